#include "cpu/isa_generic.h"

#include "bucket/bucket_cpu.inc"
