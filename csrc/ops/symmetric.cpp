// The op symmetric_all_reduce: checks, and the protocol of symmetric.h between processes on one host.
#include "ops/torch_headers.h"

#include "bucket/symmetric.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/backend.h"

namespace cuda_ext {

namespace {

using symmetric::chunk_elements;
using symmetric::kAlignment;
using symmetric::kMaxRanks;
using symmetric::kPadBytes;
using symmetric::kSlots;
using symmetric::Staging;

constexpr const char* kAllReduce = "symmetric_all_reduce";
constexpr const char* kAbort = "symmetric_abort";

// The pad of a rank on the CPU; initially zeros. Other processes write all of it except `epoch`.
struct Pad {
  // The bucket that a rank is about to sum, which must be the same on all ranks.
  struct Call {
    int64_t begin, count;  // byte offset in the segment, number of elements
    Dtype dtype;

    bool operator==(const Call& other) const {
      return begin == other.begin && count == other.count && dtype == other.dtype;
    }
  };
  struct Slot {
    uint32_t epoch;  // of the last all-reduce that began
    std::atomic<uint32_t> arrived[kMaxRanks];
    Call calls[2][kMaxRanks];      // for even and odd epochs; written before the first arrival
    BucketStats stats[kMaxRanks];  // of each rank's chunk; written before the second arrival
  };

  // Not 0 once a rank has given up; then no rank uses the memory again. The upper half is 1 + that rank, the lower half
  // has a bit for each rank that it waited for.
  std::atomic<uint64_t> broken;
  Slot slots[kSlots];
};
static_assert(sizeof(Pad) <= kPadBytes && std::atomic<uint64_t>::is_always_lock_free);

using Ranks = uint32_t;  // a bit per rank
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

// The longest sleep of a waiting rank before it checks whether the others are alive; the delay after which survivors
// notice a killed process or a broken pad.
constexpr auto kLivenessInterval = std::chrono::milliseconds(50);

// Sleeps while the word equals `seen`, until it is woken, for at most kLivenessInterval.
void sleep_while(const std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec time{0, std::chrono::nanoseconds(kLivenessInterval).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}
void wake(const std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

// Counters may wrap, so they are compared by their difference.
bool has_reached(const std::atomic<uint32_t>& word, uint32_t mark) {
  return int32_t(word.load(std::memory_order_acquire) - mark) >= 0;
}

// The pads and locks of all ranks, as seen by one rank.
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

  // Returns when all ranks have arrived at `mark`. `step`, for errors, is what a rank does before it arrives.
  void wait(int64_t slot, uint32_t mark, double timeout, const char* step) const {
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
          CUDA_EXT_CHECK(false, kAllReduce, "expected ", names_of(ended), " to ", step,
                         ", got the end of the process or of its arena; end this one too, and start all ranks again");
        }
        if (std::chrono::duration<double>(Clock::now() - begin).count() < timeout) continue;
        if (const Ranks missing = missing_at(slot, mark, /*only_ended=*/false)) {
          give_up(missing);
          CUDA_EXT_CHECK(false, kAllReduce, "expected ", names_of(missing), " to ", step, " within ", timeout,
                         " s, but it did not; look at what it does (py-spy dump), or allow more time with timeout=");
        }
      }
    }
  }

  // Breaks the pads of all ranks, because this rank no longer waits for `ranks`: every all-reduce now fails.
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
    CUDA_EXT_CHECK(false, kAllReduce, "expected memory that all ranks still use, got memory that rank ",
                   (broken >> 32) - 1, " gave up", ranks == 0 ? "" : " when it had waited for ",
                   ranks == 0 ? "" : names_of(ranks), "; make a new SymmetricArena on all ranks");
  }

 private:
  Ranks missing_at(int64_t slot, uint32_t mark, bool only_ended) const {
    Ranks ranks = 0;
    for (int peer = 0; peer < count(); ++peer) {
      if (only_ended && !has_ended(peer)) continue;
      // Checked last, because a rank may end after it has arrived.
      if (!has_reached(own().slots[slot].arrived[peer], mark)) ranks |= Ranks(1) << peer;
    }
    return ranks;
  }

  // Every rank locks its own segment; the system releases the lock when the process ends for any reason.
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

std::string describe(const Pad::Call& call) {
  static constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float64"};
  return std::to_string(call.count) + " elements of " + kNames[int(call.dtype)] + " at byte " +
         std::to_string(call.begin - kPadBytes);
}

// One rank's part of the protocol of symmetric.h.
class AllReduce {
 public:
  AllReduce(Peers peers, at::TensorList segments, int64_t rank, int64_t slot, double timeout)
      : peers_(peers), rank_(rank), slot_(slot), timeout_(timeout), own_(peers.own().slots[slot]) {
    for (int peer = 0; peer < peers.count(); ++peer) segments_[peer] = static_cast<char*>(segments[peer].data_ptr());
  }

  BucketStats run(const Pad::Call& call, const Staging& staging) {
    peers_.check_whole();
    epoch_ = ++own_.epoch;
    return staging.takes(call.count * size_of(call.dtype)) ? one_shot(call, staging) : two_shot(call);
  }

 private:
  BucketStats one_shot(const Pad::Call& call, const Staging& staging) {
    char* const bucket = segments_[rank_] + call.begin;
    std::array<void*, kMaxRanks> sources;
    for (int peer = 0; peer < peers_.count(); ++peer) {
      if (peer != rank_)
        std::memcpy(segments_[peer] + staging.row(epoch_, rank_, peers_.count()), bucket,
                    size_t(call.count * size_of(call.dtype)));
      sources[peer] = segments_[rank_] + staging.row(epoch_, peer, peers_.count());
    }
    sources[rank_] = bucket;
    announce(call);
    synchronize(2 * epoch_, "pack this bucket");
    check_same(call);
    BucketStats stats;
    void* const target = bucket;
    launch_bucket_sum({sources.data(), peers_.count(), &target, 1, call.count, call.dtype, &stats});
    return stats;
  }

  BucketStats two_shot(const Pad::Call& call) {
    announce(call);
    synchronize(2 * epoch_ - 1, "pack this bucket");
    check_same(call);
    const int64_t element_size = size_of(call.dtype);
    const int64_t chunk = chunk_elements(call.count, peers_.count(), element_size);
    const int64_t first = std::min(rank_ * chunk, call.count);
    std::array<void*, kMaxRanks> chunks;
    for (int peer = 0; peer < peers_.count(); ++peer)
      chunks[peer] = segments_[peer] + call.begin + first * element_size;
    BucketStats stats;
    launch_bucket_sum({chunks.data(), peers_.count(), chunks.data(), peers_.count(),
                       std::min(chunk, call.count - first), call.dtype, &stats});
    for (int peer = 0; peer < peers_.count(); ++peer) slot_of(peer).stats[rank_] = stats;
    synchronize(2 * epoch_, "sum its chunk of this bucket");

    BucketStats total;
    for (int peer = 0; peer < peers_.count(); ++peer) {
      total.squares += own_.stats[peer].squares;
      total.nonfinite |= own_.stats[peer].nonfinite;
    }
    return total;
  }

  Pad::Slot& slot_of(int peer) const { return reinterpret_cast<Pad*>(segments_[peer])->slots[slot_]; }

  void announce(const Pad::Call& call) const {
    for (int peer = 0; peer < peers_.count(); ++peer) slot_of(peer).calls[epoch_ & 1][rank_] = call;
  }

  void synchronize(uint32_t mark, const char* step) const {
    peers_.arrive(slot_, mark);
    peers_.wait(slot_, mark, timeout_, step);
  }

  void check_same(const Pad::Call& call) const {
    for (int peer = 0; peer < peers_.count(); ++peer) {
      const Pad::Call& other = own_.calls[epoch_ & 1][peer];
      if (other == call) continue;
      peers_.give_up(0);
      CUDA_EXT_CHECK(false, kAllReduce, "expected the same bucket on all ranks, got ", describe(call), " on rank ",
                     rank_, " and ", describe(other), " on rank ", peer,
                     "; do the ranks build the same model, and run the same buckets in the same order?");
    }
  }

  Peers peers_;
  const int64_t rank_, slot_;
  const double timeout_;
  Pad::Slot& own_;
  std::array<char*, kMaxRanks> segments_;
  uint32_t epoch_ = 0;
};

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
                   dtype_name(segment.scalar_type()), " of shape ", shape_string(segment));
    CUDA_EXT_CHECK(segment.device() == segments[0].device(), op, "expected segments[", i, "] on device ",
                   segments[0].device(), ", got ", segment.device());
  }
}

Tensor all_reduce(const Tensor& bucket, at::TensorList segments, int64_t rank, int64_t slot, int64_t one_shot_bytes,
                  at::IntArrayRef locks, double timeout) {
  check_segments(kAllReduce, segments, rank);
  check_floating(kAllReduce, "bucket", bucket);
  CUDA_EXT_CHECK(bucket.dim() == 1 && bucket.is_contiguous(), kAllReduce,
                 "expected bucket of shape (N,) and contiguous, got shape ", shape_string(bucket), " with strides ",
                 shape_string(bucket.strides()));
  const Tensor& own = segments[rank];
  const int64_t begin =
      int64_t(reinterpret_cast<uintptr_t>(bucket.data_ptr()) - reinterpret_cast<uintptr_t>(own.data_ptr()));
  CUDA_EXT_CHECK(slot >= 0 && slot < kSlots, kAllReduce, "expected slot from 0 to ", kSlots - 1, ", got ", slot);
  CUDA_EXT_CHECK(one_shot_bytes >= 0 && one_shot_bytes <= own.numel() && one_shot_bytes % kAlignment == 0, kAllReduce,
                 "expected one_shot_bytes to be a multiple of ", kAlignment, " that fits a segment, got ",
                 one_shot_bytes);
  const Staging staging = Staging::of_slot(slot, own.numel(), int64_t(segments.size()), one_shot_bytes);
  CUDA_EXT_CHECK(staging.begin >= kPadBytes && staging.begin % kAlignment == 0, kAllReduce,
                 "expected segments of a multiple of ", kAlignment, " bytes with room for the staging of slot ", slot,
                 ", got ", own.numel(), " bytes");
  CUDA_EXT_CHECK(bucket.numel() == 0 || (begin >= kPadBytes && begin + int64_t(bucket.nbytes()) <= staging.begin),
                 kAllReduce, "expected bucket to be a view of segments[", rank, "] after its first ", kPadBytes,
                 " bytes and before its staging, got other memory");
  CUDA_EXT_CHECK(bucket.numel() == 0 || begin % kAlignment == 0, kAllReduce,
                 "expected bucket to begin at a multiple of ", kAlignment, " bytes, got byte ", begin - kPadBytes);
  CUDA_EXT_CHECK(locks.empty() || locks.size() == segments.size(), kAllReduce, "expected one of locks for each of ",
                 segments.size(), " segments, or none, got ", locks.size());
  CUDA_EXT_CHECK(timeout > 0, kAllReduce, "expected a timeout of more than 0 seconds, got ", timeout);

  const Tensor out = empty_on(bucket.device(), {2}, accumulation_type(bucket.scalar_type()));
  const Pad::Call call{bucket.numel() == 0 ? kPadBytes : begin, bucket.numel(), to_dtype(bucket.scalar_type())};
  if (!bucket.is_cpu()) {
    const CudaKernels* const cuda = cuda_kernels(kAllReduce, bucket.device());
    CUDA_EXT_CHECK(bucket.scalar_type() != at::kDouble, kAllReduce,
                   "expected a bucket of at most 32 bits on a CUDA device, got float64; use the collectives of "
                   "torch.distributed");
    SymmetricParams params{{},         int(segments.size()), int(rank), int(slot), call.begin,
                           call.count, call.dtype,           staging,   timeout};
    for (size_t i = 0; i < segments.size(); ++i) params.segments[i] = segments[i].data_ptr();
    const LaunchScope scope(bucket.device());
    cuda->symmetric_all_reduce(params, out.mutable_data_ptr<float>(), scope.stream());
    return out;
  }
  const BucketStats stats = AllReduce(Peers(segments, locks, rank), segments, rank, slot, timeout).run(call, staging);
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
                              "; on other devices, waiting ranks end by their timeout");
  Peers(segments, {}, rank).give_up(0);
}

}  // namespace

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  m.def(
      "symmetric_all_reduce(Tensor(a!) bucket, Tensor(b!)[] segments, *, int rank, int slot=0, int one_shot_bytes=0, "
      "int[] locks=[], float timeout=1800.0) -> Tensor");
  m.def("symmetric_abort(Tensor(a!)[] segments, *, int rank) -> ()");
}

static void register_kernels(torch::Library& m) {
  m.impl("symmetric_all_reduce", cuda_ext::all_reduce);
  m.impl("symmetric_abort", cuda_ext::abort);
}

TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(CUDA_EXT_NAMESPACE, CUDA, m) { register_kernels(m); }
