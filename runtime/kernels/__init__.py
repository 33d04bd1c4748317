"""Operations and their kernels: an ordered registry, C++ for CPUs, Triton for GPUs, plain torch as the reference."""
