// HOST_DEVICE marks functions that host code and kernels call. It is not in arch/target.cuh with the other macros,
// because headers without device code need it too.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__ inline
#else
#define HOST_DEVICE inline
#endif
