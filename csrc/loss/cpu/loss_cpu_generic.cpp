#include "cpu/isa_generic.h"
#include "loss/cpu/loss_cpu.inc"
