#include "cpu/isa_generic.h"

#include "attention/attention_cpu.inc"
