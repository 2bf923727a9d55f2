"""Renderers of figures, tables and pages. Nothing here simulates or knows of studies."""
