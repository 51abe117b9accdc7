// Asks the current device for the properties from which launchers choose a kernel.
#pragma once

#include "base/device.h"

namespace cuda_ext::rt {

Device describe_device(const char* kernel);  // which an error names

}  // namespace cuda_ext::rt
