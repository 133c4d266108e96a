"""Reading, caching and padding of data. Independent of models, ranks and devices."""
