"""Models, and how they are loaded or built. Knows no data, no rank and no device."""
