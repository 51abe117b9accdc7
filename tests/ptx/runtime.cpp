// Replaces the CUDA runtime for nvcc's host objects: kernels are the entries of translated PTX, the device is the
// emulator, and launches that a driver would refuse are refused, with the reason in the error text.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/device.h"
#include "runtime.h"
#include "simt/launch.h"
#include "simt/tensor_map.h"

namespace cuda_ext::ptx {

namespace {

constexpr size_t kSharedWithoutAsking = 48 * 1024;
constexpr int kMaxPortableCluster = 8, kMaxCluster = 16;
constexpr int kSome = 6;  // concurrent blocks of kernels whose blocks wait for earlier ones; as in rt::launch

struct LastError {
  cudaError_t error = cudaSuccess;
  std::string reason, text;
};
// A pointer, because static TLS space for libraries loaded at run time is small.
LastError& last() {
  thread_local LastError* const own = new LastError;
  return *own;
}

// Whether the device's context is current in this thread: the runtime's functions that need one make it so, those of
// the driver do not.
bool& context_is_current() {
  thread_local bool is_current = false;
  return is_current;
}

cudaError_t refuse(cudaError_t error, const std::string& reason) {
  last() = {error, reason, ""};
  return error;
}

struct Function {
  const Entry* entry;
  std::string name;  // without namespaces and arguments
  size_t shared_allowed = kSharedWithoutAsking;
  bool nonportable_cluster = false;
};

std::map<std::string, const Entry*>& entries() {
  static std::map<std::string, const Entry*> all;
  return all;
}
int& target() {  // the newest architecture of any entry
  static int newest = 0;
  return newest;
}
std::map<const void*, std::string>& registered_names() {
  static std::map<const void*, std::string> all;
  return all;
}
std::mutex mutex;
std::string last_launch;

// "void cuda_ext::sm80::gemm_sm80<...>(...)" -> "gemm_sm80".
std::string short_name(const std::string& mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status),
                                                    std::free);
  if (status != 0) return mangled;
  std::string name = text.get();
  if (const size_t anonymous = name.find("(anonymous namespace)::"); anonymous != std::string::npos)
    name.erase(anonymous, std::strlen("(anonymous namespace)::"));
  name = name.substr(0, name.find_first_of("<("));
  return name.substr(name.find_last_of(": ") + 1);
}

// The kernel that a host object refers to by this address.
Function* find(const void* host) {
  static std::map<const void*, Function> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(host); found != known.end()) return &found->second;
  const auto name = registered_names().find(host);
  if (name == registered_names().end()) return nullptr;
  const auto entry = entries().find(name->second);
  if (entry == entries().end())
    throw simt::Fault(short_name(name->second) + ": the PTX of this kernel is not translated in this library");
  return &known.emplace(host, Function{entry->second, short_name(name->second)}).first->second;
}

// The device of the emulator's options, but at least of the kernels' architecture.
struct Device {
  int compute_capability = std::max(simt::options().compute_capability, target());
  int processors = simt::options().num_sms;
  size_t shared_bytes = size_t(rt::shared_bytes_of_sm(compute_capability));
  size_t shared_of_block = size_t(rt::shared_bytes_of_block(compute_capability));
  size_t reserved = shared_bytes - shared_of_block;  // per block
  bool is_large = compute_capability == 80 || compute_capability >= 90;
  int threads = is_large ? 2048 : compute_capability >= 80 ? 1536 : 1024;  // per SM
  int blocks = is_large ? 32 : compute_capability == 89 ? 24 : 16;

  // Blocks per SM, as limited by everything but registers, which only ptxas knows.
  int blocks_per_sm(int block, size_t shared) const {
    const size_t of_block = std::max(shared + reserved, size_t(1));
    return int(std::min({size_t(blocks), size_t(threads / block), shared_bytes / of_block}));
  }
};

std::string text(dim3 e) {
  return "(" + std::to_string(e.x) + ", " + std::to_string(e.y) + ", " + std::to_string(e.z) + ")";
}

cudaError_t launch(const cudaLaunchConfig_t& config, Function& function, void* const* arguments) {
  const Entry& entry = *function.entry;
  const Device device;
  const dim3 grid = config.gridDim, block = config.blockDim;
  dim3 cluster(1, 1, 1);
  bool cooperative = false, programmatic = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case cudaLaunchAttributeClusterDimension:
        cluster = dim3(attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z);
        if (device.compute_capability < 90)
          return refuse(cudaErrorNotSupported, "clusters need a device of compute capability 9.0");
        break;
      case cudaLaunchAttributeCooperative: cooperative = attribute.val.cooperative != 0; break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        programmatic = attribute.val.programmaticStreamSerializationAllowed != 0;
        if (programmatic && device.compute_capability < 90)
          return refuse(cudaErrorNotSupported, "programmatic launches need a device of compute capability 9.0");
        break;
      default:
        return refuse(cudaErrorInvalidValue, "launch attribute " + std::to_string(attribute.id) + " is not known here");
    }
  }
  if (block.y != 1 || block.z != 1 || block.x < 1)
    return refuse(cudaErrorInvalidConfiguration,
                  "a block of " + text(block) + " threads; the emulator supports (n, 1, 1)");
  if (int(block.x) > entry.max_threads)
    return refuse(cudaErrorInvalidValue, std::to_string(block.x) + " threads a block; the kernel's launch bound is " +
                                             std::to_string(entry.max_threads));
  if (config.dynamicSmemBytes > function.shared_allowed)
    return refuse(cudaErrorInvalidValue, std::to_string(config.dynamicSmemBytes) +
                                             " bytes of shared memory; allowed for "
                                             "this kernel are " +
                                             std::to_string(function.shared_allowed));
  const unsigned blocks_of_cluster = cluster.x * cluster.y * cluster.z;
  const int limit = function.nonportable_cluster ? kMaxCluster : kMaxPortableCluster;
  if (blocks_of_cluster < 1 || blocks_of_cluster > unsigned(limit))
    return refuse(cudaErrorInvalidClusterSize,
                  "a cluster of " + text(cluster) + " blocks; this kernel allows at most " + std::to_string(limit));
  if (grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0)
    return refuse(cudaErrorInvalidClusterSize,
                  "a cluster of " + text(cluster) + " blocks does not divide the grid of " + text(grid));
  const int64_t at_once = int64_t(device.processors) * device.blocks_per_sm(int(block.x), config.dynamicSmemBytes);
  if (cooperative && int64_t(grid.x) * grid.y * grid.z > at_once)
    return refuse(cudaErrorCooperativeLaunchTooLarge, "a grid of " + text(grid) + " blocks; at most " +
                                                          std::to_string(at_once) + " are on the device at once");

  // The parameters as the kernel reads them, in the layout that its PTX declares.
  constexpr size_t kMaxParameterBytes = 32764, kAlignment = 128;
  const Parameter end = entry.parameters.empty() ? Parameter{} : entry.parameters.back();
  const size_t bytes = size_t(end.offset + end.size);
  if (bytes > kMaxParameterBytes) return refuse(cudaErrorInvalidValue, "more than 32764 bytes of parameters");
  const auto allocated = (bytes / kAlignment + 1) * kAlignment;
  const std::unique_ptr<std::byte, void (*)(void*)> parameters(
      static_cast<std::byte*>(std::aligned_alloc(kAlignment, allocated)), std::free);
  for (size_t i = 0; i < entry.parameters.size(); ++i)
    std::memcpy(parameters.get() + entry.parameters[i].offset, arguments[i], size_t(entry.parameters[i].size));

  simt::Geometry geometry;
  geometry.grid = {int(grid.x), int(grid.y), int(grid.z)};
  geometry.block = int(block.x);
  geometry.cluster = {int(cluster.x), int(cluster.y), int(cluster.z)};
  geometry.shared_bytes = config.dynamicSmemBytes;
  geometry.concurrent_clusters = cooperative ? 0 : entry.waits_for_others ? kSome : 1;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    last_launch = "grid " + text(grid) + ", " + std::to_string(block.x) + " threads, " +
                  std::to_string(config.dynamicSmemBytes) + " bytes";
    if (blocks_of_cluster > 1) last_launch += ", cluster " + text(cluster);
    if (cooperative) last_launch += ", cooperative";
    if (programmatic) last_launch += ", programmatic";
  }
  simt::launch(function.name.c_str(), geometry, [&] { entry.run(parameters.get()); });
  return cudaSuccess;
}

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  if (!context_is_current()) return CUDA_ERROR_INVALID_CONTEXT;
  static const std::map<CUtensorMapDataType, simt::ElementType> kTypes = {
      {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, simt::ElementType::kFloat32},
      {CU_TENSOR_MAP_DATA_TYPE_FLOAT16, simt::ElementType::kFloat16},
      {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, simt::ElementType::kBFloat16},
      {CU_TENSOR_MAP_DATA_TYPE_UINT8, simt::ElementType::kUint8}};
  static const std::map<CUtensorMapSwizzle, int> kSwizzles = {{CU_TENSOR_MAP_SWIZZLE_NONE, 0},
                                                              {CU_TENSOR_MAP_SWIZZLE_32B, 32},
                                                              {CU_TENSOR_MAP_SWIZZLE_64B, 64},
                                                              {CU_TENSOR_MAP_SWIZZLE_128B, 128}};
  constexpr uintptr_t kMapAlignment = 64, kDataAlignment = 16;
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (!kTypes.contains(type) || !kSwizzles.contains(swizzle) || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  if (reinterpret_cast<uintptr_t>(map) % kMapAlignment != 0 || address % kDataAlignment != 0)
    return CUDA_ERROR_INVALID_VALUE;
  simt::TensorMapFields fields{};
  fields.base = address;
  fields.rank = uint8_t(rank);
  fields.type = kTypes.at(type);
  fields.swizzle_bytes = uint8_t(kSwizzles.at(swizzle));
  for (unsigned d = 0; d < rank; ++d) {
    if (sizes[d] < 1 || sizes[d] > uint64_t(1) << 32 || box[d] < 1 || box[d] > 256 || steps[d] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    fields.sizes[d] = sizes[d];
    fields.box[d] = uint16_t(box[d]);
    if (d == 0) continue;
    if (strides[d - 1] % 16 != 0 || strides[d - 1] >= uint64_t(1) << 40) return CUDA_ERROR_INVALID_VALUE;
    fields.strides[d - 1] = strides[d - 1];
  }
  // The emulator supports only rows of exactly the swizzle's width.
  const int row = fields.box[0] * simt::bytes_of(fields.type);
  if (row % 16 != 0 || (fields.swizzle_bytes != 0 && row != fields.swizzle_bytes)) return CUDA_ERROR_INVALID_VALUE;
  simt::encode_tensor_map(reinterpret_cast<uint64_t*>(map), fields);
  return CUDA_SUCCESS;
}

}  // namespace

Registered::Registered(const Entry* first, int count, int architecture) {
  for (int i = 0; i < count; ++i) entries().emplace(first[i].name, first + i);
  target() = std::max(target(), architecture);
}

}  // namespace cuda_ext::ptx

using namespace cuda_ext;
using cuda_ext::ptx::refuse;

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  ptx::registered_names()[host] = name;
}
// The configuration of the last accepted launch: "grid (8, 1, 1), 32 threads, 128 bytes, cooperative".
__attribute__((visibility("default"))) const char* ptx_last_launch() { return ptx::last_launch.c_str(); }

// Called by <<<>>>; nvcc's objects refer to it for every kernel.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) {
  throw simt::Fault("a launch with <<<>>>; kernels are started by rt::launch");
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  throw simt::Fault("a launch with <<<>>>; kernels are started by rt::launch");
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device != 0) return refuse(cudaErrorInvalidDevice, "the emulator is device 0");
  ptx::context_is_current() = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return refuse(cudaErrorInvalidDevice, "the emulator is device 0");
  const ptx::Device is;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = is.compute_capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = is.compute_capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = is.processors; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = int(is.shared_bytes); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(is.shared_of_block); break;
    default:
      return refuse(cudaErrorInvalidValue, "device attribute " + std::to_string(attribute) + " is not known here");
  }
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
  ptx::context_is_current() = true;
  ptx::Function* const function = ptx::find(host);
  if (function == nullptr) return refuse(cudaErrorInvalidDeviceFunction, "no such kernel");
  const ptx::Device device;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || size_t(value) > device.shared_of_block)
      return refuse(cudaErrorInvalidValue, std::to_string(value) + " bytes of shared memory; a block has at most " +
                                               std::to_string(device.shared_of_block));
    function->shared_allowed = size_t(value);
  } else if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    function->nonportable_cluster = value != 0;
  } else {
    return refuse(cudaErrorInvalidValue, "function attribute " + std::to_string(attribute) + " is not known here");
  }
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
  ptx::context_is_current() = true;
  ptx::Function* const function = ptx::find(host);
  if (function == nullptr) return refuse(cudaErrorInvalidDeviceFunction, "no such kernel");
  return ptx::launch(*config, *function, arguments);
}
cudaError_t cudaGetLastError() { return std::exchange(ptx::last().error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  ptx::LastError& last = ptx::last();
  last.text = "error " + std::to_string(int(error)) + " of the emulated device: " + last.reason;
  return last.text.c_str();
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&ptx::encode_tiled) : nullptr;
  if (result != nullptr) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
}
