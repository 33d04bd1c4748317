"""Run compiled Triton kernels without a GPU: their PTX is translated to C++ and executed on tensors in main memory.

Triton's own JIT, argument binder and launcher run over a stub of the driver's library (`device`), so that layouts,
inline assembly, specialization, launch arguments and barriers are those of a GPU. Each program runs its warps as
fibers, with 32 lanes in step until they diverge; programs and warps switch at random at barriers and atomics,
asynchronous copies to shared memory arrive only when they are waited for, and fresh shared memory holds NaN.

Not modelled: the L1 cache and weak memory order, overlapping launches, rounding inside matrix units, and time. The
supported instructions are those that Triton generates for the kernels here; any other raises `UnknownInstruction`.
"""
