"""Reading, caching and padding of data. Knows no model, no rank and no device."""
