// Adds to the module `_simt` what the paper model asks: tiles, and the launchers' choices among them.
#pragma once

#include <pybind11/pybind11.h>

void bind_choices(pybind11::module_& m);
