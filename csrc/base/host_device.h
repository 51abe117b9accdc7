// HOST_DEVICE: a function that kernels call, too. Here, and not with the other macros of kernels (arch/target.cuh), for the
// headers that files without device code include as well.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__ inline
#else
#define HOST_DEVICE inline
#endif
