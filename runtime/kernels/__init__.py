"""Fast operations: one ordered registry, native code for CPUs, Triton for GPUs, plain torch as the reference."""
