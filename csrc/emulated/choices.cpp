// What launchers choose for a problem, without launching: the evidence of the paper model (benchmarks/model).
#include "emulated/choices.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "attention/attention_bwd_sm80_launch.cuh"
#include "attention/attention_bwd_sm90_launch.cuh"
#include "attention/attention_cache_sm80_launch.cuh"
#include "attention/attention_fwd_sm80_launch.cuh"
#include "attention/attention_fwd_sm90_launch.cuh"
#include "attention/dispatch.h"
#include "bucket/bucket_kernels.cuh"
#include "gemm/gemm_sm80.cuh"
#include "gemm/plan_sm80.h"
#include "gemm/plan_sm90.h"
#include "simt/options.h"

namespace py = pybind11;
using namespace cuda_ext;

namespace {

using Numbers = std::map<std::string, int64_t>;

template <sm80::Arithmetic arithmetic, size_t shape>
Numbers gemm_config() {
  using Element = std::conditional_t<arithmetic == sm80::Arithmetic::k16Bit, bfloat16_t, float>;
  constexpr sm80::GemmConfig config = sm80::kTiles[int(arithmetic)][shape];
  using Storage = typename sm80::Gemm<Element, arithmetic, true, true, config>::Storage;
  static_assert(sizeof(Storage) == config.shared_bytes(sizeof(Element)), "plans would count on other tiles");
  return {{"block_m", config.block_m},       {"block_n", config.block_n},        {"block_k", config.block_k},
          {"stages", config.stages},         {"warps_m", config.warps_m},        {"warps_n", config.warps_n},
          {"min_blocks", config.min_blocks}, {"element_bytes", sizeof(Element)}, {"shared_bytes", sizeof(Storage)}};
}
template <sm80::Arithmetic arithmetic, size_t... shapes>
std::vector<Numbers> gemm_configs(std::index_sequence<shapes...>) {
  return {gemm_config<arithmetic, shapes>()...};
}
template <sm80::Arithmetic arithmetic>
std::vector<Numbers> gemm_configs() {
  return gemm_configs<arithmetic>(std::make_index_sequence<sm80::kNumShapes[int(arithmetic)]>());
}
// Without those of FP8, whose kernel is another one.
std::vector<std::vector<Numbers>> all_gemm_configs() {
  static_assert(sm80::kNumArithmetics == 4);
  return {gemm_configs<sm80::Arithmetic::k16Bit>(), gemm_configs<sm80::Arithmetic::kTf32>(),
          gemm_configs<sm80::Arithmetic::kThreeTf32>()};
}

Numbers gemm_choice(int arithmetic, int64_t m, int64_t n, int64_t k, int compute_capability, int processors) {
  GemmParams params{.m = m, .n = n, .k = k};
  params.a = {.row_stride = k, .column_stride = 1};
  params.b = {.row_stride = n, .column_stride = 1};
  const sm80::GemmPlan plan =
      sm80::choose_plan(params, sm80::Arithmetic(arithmetic),
                        sm80::rates_of({.compute_capability = compute_capability, .num_sms = processors}));
  return {{"shape", plan.shape}, {"splits", plan.splits}};
}

// The places of the work items of the kernel on wgmma, in the order in which clusters take them.
std::vector<std::array<int, 4>> gemm_order(const Numbers& plan) {
  sm90::GemmPlan p;
  p.row_groups = int(plan.at("row_groups"));
  p.column_tiles = int(plan.at("column_tiles"));
  p.raster = int(plan.at("raster"));
  p.batches = 1;
  std::vector<std::array<int, 4>> places;
  for (int item = 0; item < int(plan.at("items")); ++item) {
    const sm90::ItemPlace place = sm90::place_of_item(p, item);
    places.push_back({place.split, place.batch, place.row_group, place.column_tile});
  }
  return places;
}

Numbers bucket_config() {
  return {{"threads", BucketConfig::kThreads},
          {"block_elements", kBlockElements},
          {"bytes_in_flight", BucketConfig::kBytesInFlight},
          {"table_entries", bucket::kLargeChunk}};
}

// The tile that the launcher of forward or backward attention chooses, and how it distributes the work.
struct AttentionChoice {
  std::string kernel;  // mangled name of the instantiation
  Numbers tile;
  int section;             // heads of sequences per section; all tiles of a section start before the next one's
  int head_batches;        // in all sections
  int splits;              // blocks that share the work of one tile
  int long_tiles;          // of a head, with the longest lists of a block mask, that several blocks may share
  int most_parts;          // blocks that share such a tile
  std::vector<int> steps;  // of each tile of a head, in the order in which the tiles start
};

template <class Kernel>
Numbers attention_tile(int dim, int dim_v, int min_blocks, int stages) {
  return {{"dim", dim},
          {"dim_v", dim_v},
          {"block_m", Kernel::kBlockM},
          {"block_n", Kernel::kBlockN},
          {"warps", Kernel::kThreads / arch::kWarpSize},
          {"min_blocks", min_blocks},
          {"stages", stages},
          {"shared_bytes", sizeof(typename Kernel::Storage)}};
}

// The number of steps of each tile of a head, in the order in which the tiles start.
template <class Steps>
std::vector<int> steps_in_order(const attention::Schedule& schedule, const Steps& steps_of) {
  std::vector<int> steps;
  const int of_section = std::min(schedule.section, schedule.head_batches);
  for (int i = 0; i < schedule.tiles; ++i) steps.push_back(std::max(0, steps_of(schedule.find(i * of_section).tile)));
  return steps;
}

template <class Kernel>
AttentionChoice forward_choice(const AttentionParams& p, const attention::ForwardPlan& plan, const Numbers& tile) {
  const attention::Sequence sequence(p, 0);
  const attention::Visibility visible(p, sequence);
  const auto steps = [&](int index) {
    const attention::Span seen = attention::key_tiles<Kernel>(
        visible, {index * Kernel::kBlockM, sequence.q_len * plan.pack_gqa, plan.pack_gqa, 0});
    return seen.end - seen.begin;
  };
  return {typeid(Kernel).name(),
          tile,
          plan.schedule.section,
          plan.schedule.head_batches,
          plan.splits,
          plan.long_lists.tiles,
          plan.long_lists.most_parts,
          steps_in_order(plan.schedule, steps)};
}

template <class T, int dim>
struct ForwardTileSm90 {
  static AttentionChoice choose(const AttentionParams& p, const rt::Device& device) {
    return attention::sm90::with_forward<T, dim>(p, [&]<class Kernel>(Kernel) {
      constexpr const attention::sm90::ForwardConfig& config = Kernel::kConfig;
      return forward_choice<Kernel>(
          p, attention::sm90::plan_forward(p, attention::tile_of(attention::sm90::kForwardTiles, dim), device),
          attention_tile<Kernel>(config.dim, config.dim_v, 1, config.stages));
    });
  }
};

template <class T, int dim>
struct ForwardTile {
  static AttentionChoice choose(const AttentionParams& p, const rt::Device& device) {
    using namespace attention::sm80;
    const ForwardConfig config = forward_tile<T>(dim, attention::is_small(device.shared_bytes));
    const attention::ForwardPlan plan = plan_forward(p, config, device);
    return with_forward<T, dim>(p, plan, device, [&]<class Kernel>(Kernel) {
      return forward_choice<Kernel>(p, plan, attention_tile<Kernel>(config.dim, config.dim_v, Kernel::kMinBlocks, 1));
    });
  }
};

template <class Kernel>
AttentionChoice backward_choice(const AttentionBackwardParams& p, const attention::BackwardPlan& plan,
                                const Numbers& tile) {
  const attention::Sequence sequence(p, 0);
  const attention::Visibility visible(p, sequence);
  const auto steps = [&](int index) {
    const int first = (plan.schedule.tiles - 1 - index) * Kernel::kBlockN;
    const attention::Span seen = attention::query_tiles<Kernel>(visible, sequence.q_len, first);
    return (seen.end - seen.begin) * int(p.heads / p.heads_kv);
  };
  return {typeid(Kernel).name(),
          tile,
          plan.schedule.section,
          plan.schedule.head_batches,
          plan.splits,
          plan.long_lists.tiles,
          plan.long_lists.most_parts,
          steps_in_order(plan.schedule, steps)};
}

template <class T, int dim>
struct BackwardTileSm90 {
  static AttentionChoice choose(const AttentionBackwardParams& p, const rt::Device& device) {
    constexpr const attention::sm90::BackwardConfig& config = attention::tile_of(attention::sm90::kBackwardTiles, dim);
    return attention::sm90::with_backward<T, dim>(p, [&]<class Kernel>(Kernel) {
      return backward_choice<Kernel>(p, attention::plan_backward(p, config, device),
                                     attention_tile<Kernel>(config.dim, config.dim_v, 1, config.stages));
    });
  }
};

template <class T, int dim>
struct BackwardTile {
  static AttentionChoice choose(const AttentionBackwardParams& p, const rt::Device& device) {
    return attention::sm80::with_backward<T, dim>(p, device, [&]<class Kernel>(Kernel) {
      constexpr const attention::sm80::BackwardConfig& config = Kernel::kConfig;
      return backward_choice<Kernel>(p, attention::plan_backward(p, config, device),
                                     attention_tile<Kernel>(config.dim, config.dim_v, Kernel::kMinBlocks, 1));
    });
  }
};

AttentionChoice attention_choice(bool backward, const std::string& dtype, std::pair<int64_t, int64_t> lengths,
                                 std::pair<int64_t, int64_t> heads, std::pair<int64_t, int64_t> dims, int64_t batch,
                                 std::pair<int64_t, int64_t> window, bool block_mask, int compute_capability,
                                 int processors) {
  AttentionBackwardParams p;
  p.dtype = dtype == "float16" ? Dtype::kFloat16 : Dtype::kBFloat16;
  p.batch = batch;
  std::tie(p.seqlen_q, p.seqlen_k) = lengths;
  std::tie(p.heads, p.heads_kv) = heads;
  std::tie(p.dim, p.dim_v) = dims;
  std::tie(p.window_left, p.window_right) = window;
  p.query.seq_stride = p.key.seq_stride = p.dim;
  p.value.seq_stride = p.grad_out.seq_stride = p.dim_v;
  constexpr int32_t kLists[2] = {};
  if (block_mask) {
    p.block_mask.keys_of_queries.data = p.block_mask.queries_of_keys.data = kLists;
    p.block_mask.query_blocks = (p.seqlen_q + kMaskBlock - 1) / kMaskBlock;
    p.block_mask.key_blocks = (p.seqlen_k + kMaskBlock - 1) / kMaskBlock;
  }
  const rt::Device device{compute_capability, processors,
                          simt::Options{.compute_capability = compute_capability}.shared_bytes()};
  const auto choose = [&](auto tile) { return tile.choose(p, device); };
  if (!backward && attention::sm90::forward_refusal(p, device).empty())
    return attention::with_kernel<ForwardTileSm90, attention::kHeadDims, attention::kNoHeadDims>("attention_fwd_sm90",
                                                                                                 p, choose);
  if (backward && attention::sm90::backward_refusal(p, device).empty())
    return attention::with_kernel<BackwardTileSm90, attention::kHeadDims, attention::kNoHeadDims>("attention_bwd_sm90",
                                                                                                  p, choose);
  return backward ? attention::with_kernel<BackwardTile, attention::kHeadDims, attention::kFloat32BackwardHeadDims>(
                        "attention_bwd_sm80", p, choose)
                  : attention::with_kernel<ForwardTile, attention::kHeadDims, attention::kFloat32HeadDims>(
                        "attention_fwd_sm80", p, choose);
}

// The kernel that attention over a cache runs.
struct CacheChoice {
  std::string kernel;
  Numbers tile;
  int blocks;
  std::vector<int> steps;  // of each item, in the order in which blocks take them
  int splits;              // of the sequence that has most
};

template <class T, int dim>
struct CacheChooser {
  static CacheChoice choose(const CachedAttentionParams& p, const std::vector<int>& lengths, const rt::Device& device) {
    return attention::sm80::with_cache_kernel<T, dim>(
        p, device, [&]<class Kernel>(Kernel, const attention::sm80::CacheConfig& config) {
          const attention::CachePlan plan = attention::plan_cache(p, config, device);
          CacheChoice choice{typeid(Kernel).name(),
                             attention_tile<Kernel>(config.dim, config.dim_v, config.min_blocks, 2),
                             attention::sm80::cache_grid(p, plan, config, device),
                             {},
                             1};
          for (const int length : lengths) {
            const int tiles = (length + Kernel::kBlockN - 1) / Kernel::kBlockN;
            const int splits = attention::cache_splits(tiles, plan.wanted_splits, plan.fixed_splits);
            const int of_split = (tiles + splits - 1) / splits;
            choice.splits = std::max(choice.splits, splits);
            for (int item = 0; item < int(p.heads_kv) * plan.row_tiles * splits; ++item)
              choice.steps.push_back(std::clamp(tiles - item % splits * of_split, 0, of_split));
          }
          return choice;
        });
  }
};

// Without a mask.
CacheChoice cache_choice(const std::vector<int>& lengths, int64_t capacity, int64_t queries,
                         std::pair<int64_t, int64_t> heads, int64_t dim, int compute_capability, int processors) {
  CachedAttentionParams p;
  p.dtype = Dtype::kBFloat16;
  p.batch = int64_t(lengths.size());
  p.seqlen_q = queries;
  p.seqlen_k = p.cache.capacity = capacity;
  std::tie(p.heads, p.heads_kv) = heads;
  p.dim = p.dim_v = dim;
  const rt::Device device{compute_capability, processors,
                          simt::Options{.compute_capability = compute_capability}.shared_bytes()};
  return attention::with_kernel<CacheChooser, attention::kCacheHeadDims, attention::kFloat32HeadDims>(
      "attention_cache_sm80", p, [&](auto chooser) { return chooser.choose(p, lengths, device); });
}

}  // namespace

void bind_choices(py::module_& m) {
  m.attr("SHORTEST_PART") = attention::kShortestPart;  // blocks of a list that has several parts
  m.def("gemm_configs", all_gemm_configs, "The kernels for products, by arithmetic and tile shape.");
  m.def("gemm_choice", gemm_choice, py::arg("arithmetic"), py::arg("m"), py::arg("n"), py::arg("k"),
        py::arg("compute_capability"), py::arg("processors"),
        "The index into gemm_configs that the launcher chooses for a device, and the number of blocks that split k.");
  m.def(
      "gemm_order", gemm_order, py::arg("plan"),
      "(split, batch, row group, column tile) of the work items of a plan of torch.ops.cuda_ext._gemm_plan, in order.");
  m.def("bucket_config", bucket_config);
  py::class_<AttentionChoice>(m, "AttentionChoice")
      .def_readonly("kernel", &AttentionChoice::kernel)
      .def_readonly("tile", &AttentionChoice::tile)
      .def_readonly("section", &AttentionChoice::section)
      .def_readonly("head_batches", &AttentionChoice::head_batches)
      .def_readonly("splits", &AttentionChoice::splits)
      .def_readonly("long_tiles", &AttentionChoice::long_tiles)
      .def_readonly("most_parts", &AttentionChoice::most_parts)
      .def_readonly("steps", &AttentionChoice::steps);
  py::class_<CacheChoice>(m, "CacheChoice")
      .def_readonly("kernel", &CacheChoice::kernel)
      .def_readonly("tile", &CacheChoice::tile)
      .def_readonly("blocks", &CacheChoice::blocks)
      .def_readonly("steps", &CacheChoice::steps)
      .def_readonly("splits", &CacheChoice::splits);
  m.def("cache_choice", cache_choice, py::arg("lengths"), py::arg("capacity"), py::arg("queries"), py::arg("heads"),
        py::arg("dim"), py::arg("compute_capability"), py::arg("processors"));
  m.def("attention_choice", attention_choice, py::arg("backward"), py::arg("dtype"), py::arg("lengths"),
        py::arg("heads"), py::arg("dims"), py::arg("batch"), py::arg("window"), py::arg("block_mask"),
        py::arg("compute_capability"), py::arg("processors"),
        "The tile that the launcher chooses for a device, and the steps of its blocks. lengths and heads are those of "
        "queries and keys, dims those of queries and values; window is as in AttentionParams. With a block mask the "
        "steps are not those of its lists.");
}
