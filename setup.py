"""Builds the compiled copy kernel where there is a C compiler; pyproject.toml has all the rest.

The kernel is optional: without it the package installs and works, and copies report `numpy`.
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
        )
    ]
)
