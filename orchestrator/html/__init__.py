"""Pages that need nothing but a browser: HTML and SVG made here, no network, no framework."""
