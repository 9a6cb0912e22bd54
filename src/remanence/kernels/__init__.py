"""Hand-written and compiled operators: tracing, compiling, convolutions, pooling. They know tensors, and neither clients nor methods."""
