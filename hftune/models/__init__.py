"""Models, and how they are loaded or built. Independent of data, ranks and devices."""
