"""A model as a table: benchmarks asked, judged, estimated, and set beside the paper's Table 1."""
