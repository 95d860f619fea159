"""Builds the compiled parts where there is a C compiler; pyproject.toml has all the rest.

They are optional: without them the package installs and works, copies report `numpy`, numpy fills
the headers of rows, and keys are found in a dict.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "backends.copy._kernel",
            sources=["backends/copy/_kernel.c"],
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "backends.tier.filesystem._files",
            sources=["backends/tier/filesystem/_files.c", "backends/tier/filesystem/_ring.c"],
            depends=["backends/_xxh3.h", "backends/tier/filesystem/_ring.h"],
            include_dirs=["backends"],
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "backends._headers",
            sources=["backends/_headers.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "backends.policy._sketch",
            sources=["backends/policy/_sketch.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "backends.table._table",
            sources=["backends/table/_table.c"],
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ]
)
