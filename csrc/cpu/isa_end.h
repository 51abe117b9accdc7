// Last include of a kernel's variant: clang wants the end of what the first include began.
#pragma once

#if defined(CUDA_EXT_ISA_PUSHED)
#pragma clang attribute pop
#endif
