"""Compiled Triton kernels run without a GPU: their PTX is translated to C++ and executed on tensors of main memory.

Triton's own JIT, argument binder and launcher run over a stub of the driver's library (`device`), so that layouts,
inline assembly, specialization, launch arguments and barriers are those of a GPU. Each program has its warps as fibers,
32 lanes in step as far as they agree; programs and warps take turns at random at barriers and atomics, copies to shared
memory arrive only when they are waited for, and fresh shared memory holds NaN.

Not modelled: the L1 cache and weak order of memory, launches that overlap, rounding inside matrix units, and time.
Instructions are those that Triton writes for the kernels here; one that is not known is named (`UnknownInstruction`).
"""
