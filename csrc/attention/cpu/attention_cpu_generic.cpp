#include "cpu/isa_generic.h"

#include "attention/cpu/attention_cpu.inc"
