"""Looks at a finished or growing run: pages and cards made from the files in its folder, without training or a model."""
