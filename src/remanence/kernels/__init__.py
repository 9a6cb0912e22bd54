"""Hand-written operators, and tracing, capturing and compiling of tensor functions.

They work on tensors and use neither clients nor methods. Imports core only. Every hand-written
operator has its measured gain in its module's docstring; `benchmarks/notes.md` describes the
measurements.

    grouped_conv        replaces the convolutions and batch norms of a stack of models on a GPU
    triton_conv         narrow layers: one Triton kernel for all models of a stack
    conv_channels_last  wide layers: cuDNN's grouped convolutions, channels last
    conv_per_client     layers with a stride or 512 channels: one cuDNN call for each model
    winograd            convolutions of compiled steps on a CPU, with fewer products
    maxpool_backward    gradient of max pooling in compiled steps on a CPU
    trace               a function as a graph of tensor operations, for replay or the compiler
    compile             compiles such graphs, once for each layout of the inputs
    capture             CUDA graphs, and trees of tensors at fixed addresses
    torch_internals     all private parts of torch that Remanence uses

The environment variable `REMANENCE_KERNELS=0` turns all hand-written operators off: torch's own
operators run instead, with the same results up to rounding. It is read whenever steps are traced
or captured, and worker processes inherit it.
"""

import os

SWITCH = "REMANENCE_KERNELS"


def kernels_enabled() -> bool:
    """Whether hand-written operators replace torch's; see `REMANENCE_KERNELS` above."""
    return os.environ.get(SWITCH, "1") != "0"
