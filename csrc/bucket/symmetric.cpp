// The op symmetric_all_reduce: checks, and the protocol of symmetric.h between processes of one host.
#include "bucket/symmetric.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <vector>

#include "binding/device.h"

namespace cuda_ext {

namespace {

using symmetric::chunk_elements;
using symmetric::kAlignment;
using symmetric::kMaxRanks;
using symmetric::kPadBytes;
using symmetric::kSlots;

constexpr const char* kAllReduce = "symmetric_all_reduce";
constexpr const char* kAbort = "symmetric_abort";

// The pad of a rank on the CPU; zeros are an empty one. All of it but `epoch` is written by other processes.
struct Pad {
  // What a rank is about to sum, which must be the same on all.
  struct Call {
    int64_t begin, count;  // bytes from the beginning of the segment, elements
    Dtype dtype;
  };
  struct Slot {
    uint32_t epoch;  // of the all-reduce begun last
    std::atomic<uint32_t> arrived[kMaxRanks];
    Call calls[kMaxRanks];         // before the first arrival
    BucketStats stats[kMaxRanks];  // of each rank's chunk, before the second
  };

  // Once a rank has given up, nobody uses the memory again: in the upper half 1 + that rank, in the lower one a bit for
  // each rank that it waited for.
  std::atomic<uint64_t> broken;
  Slot slots[kSlots];
};
static_assert(sizeof(Pad) <= kPadBytes && std::atomic<uint64_t>::is_always_lock_free);

using Ranks = uint32_t;  // a bit for each
static_assert(kMaxRanks <= 32);

using Clock = std::chrono::steady_clock;

// "rank 1", "ranks 1, 3"
std::string names_of(Ranks ranks) {
  std::string text = (ranks & (ranks - 1)) == 0 ? "rank " : "ranks ";
  const char* separator = "";
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    text += separator + std::to_string(rank);
    separator = ", ";
  }
  return text;
}

// A rank that waits sleeps this long at most before it looks whether the others still live: what a killed process or a
// broken pad costs the survivors.
constexpr auto kGlance = std::chrono::milliseconds(50);

// Sleeps until the word is woken and no longer `seen`, or kGlance is over.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec time{0, std::chrono::nanoseconds(kGlance).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}
void wake(const std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

// Counters may wrap, so that only their difference tells which is ahead.
bool has_reached(const std::atomic<uint32_t>& word, uint32_t mark) {
  return int32_t(word.load(std::memory_order_acquire) - mark) >= 0;
}

// What the ranks of a group have of each other.
class Peers {
 public:
  Peers(at::TensorList segments, at::IntArrayRef locks, int64_t rank) : locks_(locks), rank_(int(rank)) {
    for (const Tensor& segment : segments) pads_.push_back(static_cast<Pad*>(segment.data_ptr()));
  }

  int count() const { return int(pads_.size()); }
  Pad& own() const { return *pads_[rank_]; }

  void arrive(int64_t slot, uint32_t mark) const {
    for (Pad* pad : pads_) {
      std::atomic<uint32_t>& word = pad->slots[slot].arrived[rank_];
      word.store(mark, std::memory_order_release);
      if (pad != &own()) wake(word);
    }
  }

  // Returns when all ranks have arrived at `mark`. `deed` says what one does before it arrives.
  void wait(int64_t slot, uint32_t mark, double timeout, const char* deed) const {
    const Clock::time_point begin = Clock::now();
    const auto& arrived = own().slots[slot].arrived;
    for (int peer = 0; peer < count(); ++peer) {
      while (true) {
        const uint32_t seen = arrived[peer].load(std::memory_order_acquire);
        if (int32_t(seen - mark) >= 0) break;
        check_whole();
        sleep_while(arrived[peer], seen);
        if (has_reached(arrived[peer], mark)) break;
        if (const Ranks ended = missing_at(slot, mark, /*only_ended=*/true)) {
          give_up(ended);
          CUDA_EXT_CHECK(false, kAllReduce, "expected ", names_of(ended), " to ", deed,
                         ", got the end of the process or of its arena; end this one too, and start all ranks again");
        }
        if (std::chrono::duration<double>(Clock::now() - begin).count() < timeout) continue;
        if (const Ranks missing = missing_at(slot, mark, /*only_ended=*/false)) {
          give_up(missing);
          CUDA_EXT_CHECK(false, kAllReduce, "expected ", names_of(missing), " to ", deed, " within ", timeout,
                         " s, got no sign of it; look at what it does (py-spy dump), or allow more time with timeout=");
        }
      }
    }
  }

  // Makes all ranks fail, now and in the future: this one waits no longer for `ranks`.
  void give_up(Ranks ranks) const {
    for (Pad* pad : pads_) {
      uint64_t whole = 0;
      pad->broken.compare_exchange_strong(whole, uint64_t(rank_ + 1) << 32 | ranks, std::memory_order_acq_rel);
    }
  }

  void check_whole() const {
    const uint64_t broken = own().broken.load(std::memory_order_acquire);
    if (broken == 0) return;
    const Ranks ranks = Ranks(broken);
    CUDA_EXT_CHECK(false, kAllReduce, "expected memory that all ranks still use, got one that rank ",
                   (broken >> 32) - 1, " gave up", ranks == 0 ? "" : " when it had waited for ",
                   ranks == 0 ? "" : names_of(ranks), "; make a new SymmetricArena on all ranks");
  }

 private:
  Ranks missing_at(int64_t slot, uint32_t mark, bool only_ended) const {
    Ranks ranks = 0;
    for (int peer = 0; peer < count(); ++peer) {
      if (only_ended && !has_ended(peer)) continue;
      // Looked at last: who has arrived may end.
      if (!has_reached(own().slots[slot].arrived[peer], mark)) ranks |= Ranks(1) << peer;
    }
    return ranks;
  }

  // Every rank holds a lock on its own segment, which the system drops with the process, however it ends.
  bool has_ended(int peer) const {
    if (peer == rank_ || locks_.empty()) return false;
    struct flock lock{};
    lock.l_type = F_WRLCK;
    return fcntl(int(locks_[peer]), F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
  }

  std::vector<Pad*> pads_;
  at::IntArrayRef locks_;
  int rank_;
};

bool operator==(const Pad::Call& a, const Pad::Call& b) {
  return a.begin == b.begin && a.count == b.count && a.dtype == b.dtype;
}
std::string describe(const Pad::Call& call) {
  static constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float64"};
  return std::to_string(call.count) + " elements of " + kNames[int(call.dtype)] + " at byte " +
         std::to_string(call.begin - kPadBytes);
}

BucketStats all_reduce_cpu(const Peers& peers, at::TensorList segments, const Pad::Call& call, int64_t rank,
                           int64_t slot, double timeout) {
  peers.check_whole();
  Pad::Slot& own = peers.own().slots[slot];
  const uint32_t epoch = ++own.epoch;
  for (const Tensor& segment : segments) static_cast<Pad*>(segment.data_ptr())->slots[slot].calls[rank] = call;
  peers.arrive(slot, 2 * epoch - 1);
  peers.wait(slot, 2 * epoch - 1, timeout, "pack this bucket");
  for (int peer = 0; peer < peers.count(); ++peer) {
    if (own.calls[peer] == call) continue;
    peers.give_up(0);
    CUDA_EXT_CHECK(false, kAllReduce, "expected the same bucket on all ranks, got ", describe(call), " on rank ", rank,
                   " and ", describe(own.calls[peer]), " on rank ", peer,
                   "; do the ranks build the same model, and run the same buckets in the same order?");
  }

  const int64_t element_size = size_of(call.dtype);
  const int64_t chunk = chunk_elements(call.count, peers.count(), element_size);
  const int64_t first = std::min(rank * chunk, call.count);
  std::array<void*, kMaxRanks> buckets;
  for (int peer = 0; peer < peers.count(); ++peer)
    buckets[peer] = static_cast<char*>(segments[peer].data_ptr()) + call.begin + first * element_size;
  BucketStats stats;
  launch_bucket_sum({buckets.data(), peers.count(), std::min(chunk, call.count - first), call.dtype, &stats});
  for (const Tensor& segment : segments) static_cast<Pad*>(segment.data_ptr())->slots[slot].stats[rank] = stats;
  peers.arrive(slot, 2 * epoch);
  peers.wait(slot, 2 * epoch, timeout, "sum its chunk of this bucket");

  BucketStats total;
  for (int peer = 0; peer < peers.count(); ++peer) {
    total.squares += own.stats[peer].squares;
    total.nonfinite |= own.stats[peer].nonfinite;
  }
  return total;
}

void check_segments(const char* op, at::TensorList segments, int64_t rank) {
  CUDA_EXT_CHECK(!segments.empty() && segments.size() <= size_t(kMaxRanks), op,
                 "expected one segment for each of 1 to ", kMaxRanks, " ranks, got ", segments.size());
  CUDA_EXT_CHECK(rank >= 0 && rank < int64_t(segments.size()), op, "expected rank from 0 to ", segments.size() - 1,
                 ", got ", rank);
  for (size_t i = 0; i < segments.size(); ++i) {
    const Tensor& segment = segments[i];
    CUDA_EXT_CHECK(segment.scalar_type() == at::kByte && segment.dim() == 1 && segment.is_contiguous() &&
                       segment.numel() == segments[0].numel() && segment.numel() >= kPadBytes,
                   op, "expected segments[", i,
                   "] of dtype uint8, contiguous and of the same size as the others, at least ", kPadBytes, ", got ",
                   segment.scalar_type(), " of shape ", shape_string(segment));
    CUDA_EXT_CHECK(segment.device() == segments[0].device(), op, "expected segments[", i, "] on device ",
                   segments[0].device(), ", got ", segment.device());
  }
}

Tensor all_reduce(const Tensor& bucket, at::TensorList segments, int64_t rank, int64_t slot, at::IntArrayRef locks,
                  double timeout) {
  check_segments(kAllReduce, segments, rank);
  check_floating(kAllReduce, "bucket", bucket);
  CUDA_EXT_CHECK(bucket.dim() == 1 && bucket.is_contiguous(), kAllReduce,
                 "expected bucket of shape (N,) and contiguous, got shape ", shape_string(bucket), " with strides ",
                 shape_string(bucket.strides()));
  const Tensor& own = segments[rank];
  const int64_t begin =
      int64_t(reinterpret_cast<uintptr_t>(bucket.data_ptr()) - reinterpret_cast<uintptr_t>(own.data_ptr()));
  CUDA_EXT_CHECK(bucket.numel() == 0 || (begin >= kPadBytes && begin + int64_t(bucket.nbytes()) <= own.numel()),
                 kAllReduce, "expected bucket to be a view of segments[", rank, "] behind its first ", kPadBytes,
                 " bytes, got other memory");
  CUDA_EXT_CHECK(bucket.numel() == 0 || begin % kAlignment == 0, kAllReduce,
                 "expected bucket to begin at a multiple of ", kAlignment, " bytes, got byte ", begin - kPadBytes);
  CUDA_EXT_CHECK(slot >= 0 && slot < kSlots, kAllReduce, "expected slot from 0 to ", kSlots - 1, ", got ", slot);
  CUDA_EXT_CHECK(locks.empty() || locks.size() == segments.size(), kAllReduce, "expected one of locks for each of ",
                 segments.size(), " segments, or none, got ", locks.size());
  CUDA_EXT_CHECK(timeout > 0, kAllReduce, "expected a timeout of more than 0 seconds, got ", timeout);

  const Tensor out = empty_on(bucket.device(), {2}, accumulation_type(bucket.scalar_type()));
  const Pad::Call call{bucket.numel() == 0 ? kPadBytes : begin, bucket.numel(), to_dtype(bucket.scalar_type())};
  if (!bucket.is_cpu()) {
    const CudaKernels* const cuda = cuda_kernels(kAllReduce, bucket.device(), bucket.scalar_type());
    SymmetricParams params{{}, int(segments.size()), int(rank), int(slot), call.begin, call.count, call.dtype, timeout};
    for (size_t i = 0; i < segments.size(); ++i) params.segments[i] = segments[i].data_ptr();
    const LaunchScope scope(bucket.device(), 0);
    cuda->symmetric_all_reduce(params, out.mutable_data_ptr<float>(), scope.stream());
    return out;
  }
  const BucketStats stats = all_reduce_cpu(Peers(segments, locks, rank), segments, call, rank, slot, timeout);
  const auto write = [&](auto* p) {
    using T = std::remove_pointer_t<decltype(p)>;
    p[0] = T(stats.squares);
    p[1] = T(stats.nonfinite);
  };
  if (call.dtype == Dtype::kFloat64)
    write(out.mutable_data_ptr<double>());
  else
    write(out.mutable_data_ptr<float>());
  return out;
}

void abort(at::TensorList segments, int64_t rank) {
  check_segments(kAbort, segments, rank);
  TORCH_CHECK_NOT_IMPLEMENTED(segments[rank].is_cpu(), CUDA_EXT_OP("symmetric_abort"),
                              ": expected segments on the CPU, got ", segments[rank].device(),
                              "; there, ranks that wait end by their timeout");
  Peers(segments, {}, rank).give_up(0);
}

}  // namespace

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  m.def(
      "symmetric_all_reduce(Tensor(a!) bucket, Tensor(b!)[] segments, *, int rank, int slot=0, int[] locks=[], "
      "float timeout=1800.0) -> Tensor");
  m.def("symmetric_abort(Tensor(a!)[] segments, *, int rank) -> ()");
}

static void register_kernels(torch::Library& m) {
  m.impl("symmetric_all_reduce", cuda_ext::all_reduce);
  m.impl("symmetric_abort", cuda_ext::abort);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }
