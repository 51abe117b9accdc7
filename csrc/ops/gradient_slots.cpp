#include "ops/torch_headers.h"

#include "ops/gradient_slots.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cmath>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace cuda_ext {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// Holds one slot for each of its parameters. Passes of one holder do not overlap.
class GradientSlots : public torch::CustomClassHolder {
 public:
  ~GradientSlots() override;

  void assign(const std::vector<Tensor>& parameters, const std::vector<Tensor>& views);
  void open(double scale);
  void close();
  bool collect(int64_t index);
  bool take(int64_t index);
  bool lock(int64_t index);
  void unlock_all();
  void release();

 private:
  friend class SlotWrite;
  const std::shared_ptr<GradientSlot>& at(const char* method, int64_t index) const;
  bool update(const char* method, int64_t index, bool moves, bool locks);
  void forget_pass();

  std::vector<std::shared_ptr<GradientSlot>> slots_;
  bool open_ = false;
  double scale_ = 1.0;
};

struct GradientSlot {
  enum class State : uint8_t {
    kEmpty,     // not written in this pass
    kWritten,   // view holds the scaled sum; parameter.grad, if defined, must still be added
    kComplete,  // view holds the scaled sum, and parameter.grad is view
  };

  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;

  const GradientSlots* holder;  // null once it has released the slot
  WeakTensor parameter;         // prevents reuse of the address, without keeping the parameter alive
  Tensor view;
  State state = State::kEmpty;
  bool locked = false;
  bool busy = false;                    // a SlotWrite is writing to view
  std::optional<c10::Stream> stream{};  // of the last write to view, on devices with streams
};

namespace {

// Guards the registry and the state of slots and holders. It is held for a few instructions, and never while a tensor
// is destroyed, which may acquire Python's GIL. The data of a slot needs no lock: in a pass one thread of the engine
// runs all nodes of a parameter's device.
std::mutex mutex;

// Slots by parameter. Never destroyed, because holders owned by Python may be destroyed after static objects.
using Registry = std::unordered_map<const at::TensorImpl*, std::shared_ptr<GradientSlot>>;
Registry& registry() {
  static auto* const slots = new Registry;
  return *slots;
}

// Whether `grad` is the tensor in the slot.
bool lives_in(const Tensor& grad, const Tensor& view) {
  return grad.defined() && !at::isTensorSubclassLike(grad) && grad.scalar_type() == view.scalar_type() &&
         grad.device() == view.device() && grad.sizes() == view.sizes() && grad.is_contiguous() &&
         grad.const_data_ptr() == view.const_data_ptr();
}

std::optional<c10::Stream> current_stream(at::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// The engine synchronises streams for the gradients that it passes on, but not for those written to slots.
void wait_for(const std::optional<c10::Stream>& writer, const std::optional<c10::Stream>& reader) {
  if (!writer || !reader || *writer == *reader) return;
  c10::Event written(writer->device_type());
  written.record(*writer);
  written.block(*reader);
}

void record_write(const Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Whether the current backward call executes `node`. Not if it was asked for other gradients only, or if it captures
// the gradient that arrives at `node`, as torch.autograd.grad does.
bool is_executed(Node* node) {
  const auto* const reached = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (reached == nullptr || reached->count(node) == 0) return false;
  const auto& asked = *torch::autograd::get_current_graph_task_exec_info();
  if (asked.empty()) return true;
  const auto found = asked.find(node);
  return found != asked.end() && found->second.needed_ && found->second.captures_ == nullptr;
}

// Whether no hook sees the gradients that arrive at `node`.
bool is_unobserved(Node* node) { return node->pre_hooks().empty() && node->tensor_pre_hooks().empty(); }

// The AccumulateGrad of the leaf that is input `input` of `node`, also if autocast converted the leaf to another dtype.
// Null if the gradient must be returned, because something else observes it.
AccumulateGrad* find_accumulator(const Node& node, uint32_t input) {
  Node* next = node.next_edge(input).function.get();
  if (next != nullptr && next->name() == "ToCopyBackward0") {
    if (!is_executed(next) || !is_unobserved(next) || !next->retains_grad_hooks().empty() ||
        !next->post_hooks().empty())
      return nullptr;
    next = next->next_edge(0).function.get();
  }
  auto* const accumulator = dynamic_cast<AccumulateGrad*>(next);
  if (accumulator == nullptr || !is_executed(accumulator) || !is_unobserved(accumulator) ||
      accumulator->tensor_post_acc_grad_hooks() != nullptr)
    return nullptr;
  return accumulator;
}

// Adds parameter.grad to the slot.
void merge(GradientSlot& slot, const Tensor& parameter, double scale) {
  Tensor& grad = parameter.mutable_grad();
  const auto here = current_stream(slot.view.device());
  wait_for(slot.stream, here);
  if (!grad.defined()) return;
  const at::NoGradGuard no_grad;
  slot.view.add_(grad, scale);
  slot.stream = here;
  grad.reset();
}

// Moves parameter.grad to the slot, which is empty; returns false if there is nothing that can be moved.
bool move_to(GradientSlot& slot, const Tensor& parameter, double scale) {
  Tensor& grad = parameter.mutable_grad();
  const Tensor& view = slot.view;
  if (!grad.defined() || at::isTensorSubclassLike(grad) || grad.layout() != at::kStrided || grad.requires_grad() ||
      grad.scalar_type() != view.scalar_type() || grad.device() != view.device() || grad.sizes() != view.sizes())
    return false;
  const at::NoGradGuard no_grad;
  if (!lives_in(grad, view)) {
    using Pack = Tensor(at::TensorList, const Tensor&, c10::SymIntArrayRef, double, at::IntArrayRef, bool);
    static const auto pack = find_op<Pack>(CUDA_EXT_OP("bucket_pack"));
    pack.call({grad}, view.view(-1), {0}, scale, {}, /*stats=*/false);
  } else if (scale != 1.0) {
    Tensor(view).mul_(scale);
  }
  slot.stream = current_stream(view.device());
  grad.reset();
  return true;
}

}  // namespace

// GradientSlots

GradientSlots::~GradientSlots() { release(); }

void GradientSlots::assign(const std::vector<Tensor>& parameters, const std::vector<Tensor>& views) {
  constexpr const char* method = "GradientSlots.assign";
  CUDA_EXT_CHECK(parameters.size() == views.size(), method, "expected one view for each of ", parameters.size(),
                 " parameters, got ", views.size());
  std::vector<std::shared_ptr<GradientSlot>> slots;
  std::unordered_set<const at::TensorImpl*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor &parameter = parameters[i], &view = views[i];
    CUDA_EXT_CHECK(!at::isTensorSubclassLike(parameter) && !at::isTensorSubclassLike(view), method,
                   "expected parameters[", i, "] and its view to be dense tensors, got a tensor subclass");
    CUDA_EXT_CHECK(parameter.is_leaf(), method, "expected parameters[", i,
                   "] to be a leaf, whose gradient autograd accumulates, got the result of an op");
    CUDA_EXT_CHECK(seen.insert(parameter.unsafeGetTensorImpl()).second, method,
                   "expected every parameter once, got "
                   "parameters[",
                   i, "] again");
    CUDA_EXT_CHECK(view.sizes() == parameter.sizes() && view.is_contiguous(), method, "expected views[", i,
                   "] contiguous and of shape ", shape_string(parameter), ", that of its parameter, got shape ",
                   shape_string(view), " with strides ", shape_string(view.strides()));
    CUDA_EXT_CHECK(view.scalar_type() == parameter.scalar_type() && view.device() == parameter.device(), method,
                   "expected views[", i, "] of dtype ", dtype_name(parameter.scalar_type()), " on device ",
                   parameter.device(), ", as its parameter, got ", dtype_name(view.scalar_type()), " on ",
                   view.device());
    CUDA_EXT_CHECK(!view.requires_grad(), method, "expected views[", i,
                   "] to need no gradient, got requires_grad=True; detach it");
    slots.push_back(std::make_shared<GradientSlot>(
        GradientSlot{this, GradientSlot::WeakTensor(parameter.getIntrusivePtr()), view}));
  }
  {
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto found = registry().find(parameters[i].unsafeGetTensorImpl());
      CUDA_EXT_CHECK(found == registry().end() || found->second->holder == this, method, "expected parameters[", i,
                     "] without a slot, got one that has a slot of another holder; release that first");
    }
  }
  release();
  const std::lock_guard lock(mutex);
  for (size_t i = 0; i < parameters.size(); ++i) registry()[parameters[i].unsafeGetTensorImpl()] = slots[i];
  gradient_slot_count += int64_t(slots.size());
  slots_.swap(slots);
}

void GradientSlots::release() {
  std::vector<std::shared_ptr<GradientSlot>> dropped;  // destroyed after the mutex is unlocked
  const std::lock_guard lock(mutex);
  for (const auto& slot : slots_) {
    registry().erase(slot->parameter._unsafe_get_target());
    slot->holder = nullptr;
  }
  gradient_slot_count -= int64_t(slots_.size());
  dropped.swap(slots_);
}

void GradientSlots::forget_pass() {
  for (const auto& slot : slots_) slot->state = GradientSlot::State::kEmpty;
}

void GradientSlots::open(double scale) {
  CUDA_EXT_CHECK(std::isfinite(scale), "GradientSlots.open", "expected a finite scale, got ", scale);
  const std::lock_guard lock(mutex);
  forget_pass();
  scale_ = scale;
  open_ = true;
}

void GradientSlots::close() {
  const std::lock_guard lock(mutex);
  forget_pass();
  open_ = false;
}

void GradientSlots::unlock_all() {
  const std::lock_guard lock(mutex);
  forget_pass();
  for (const auto& slot : slots_) slot->locked = false;
}

const std::shared_ptr<GradientSlot>& GradientSlots::at(const char* method, int64_t index) const {
  CUDA_EXT_CHECK(index >= 0 && index < int64_t(slots_.size()), method, "expected the index of one of ", slots_.size(),
                 " slots, got ", index);
  return slots_[index];
}

bool GradientSlots::collect(int64_t index) { return update("GradientSlots.collect", index, false, false); }

bool GradientSlots::take(int64_t index) { return update("GradientSlots.take", index, true, false); }

bool GradientSlots::lock(int64_t index) { return update("GradientSlots.lock", index, false, true); }

bool GradientSlots::update(const char* method, int64_t index, bool moves, bool locks) {
  using State = GradientSlot::State;
  const std::shared_ptr<GradientSlot> slot = at(method, index);
  const Tensor parameter(slot->parameter.lock());
  State state;
  {
    const std::lock_guard guard(mutex);
    moves = moves && open_ && !slot->locked;
    slot->locked |= locks;
    state = slot->state;
  }
  if (!parameter.defined()) return false;
  if (state == State::kComplete) return lives_in(parameter.grad(), slot->view);
  if (state == State::kWritten)
    merge(*slot, parameter, scale_);
  else if (!moves || !move_to(*slot, parameter, scale_))
    return false;
  const bool complete = locks || scale_ == 1.0;
  if (complete) parameter.mutable_grad() = slot->view;
  const std::lock_guard guard(mutex);
  slot->state = complete ? State::kComplete : State::kWritten;
  return true;
}

// SlotWrite

void SlotWrite::find(uint32_t input, const Tensor& grad) {
  using State = GradientSlot::State;
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || c10::GradMode::is_enabled() || at::isTensorSubclassLike(grad)) return;
  const AccumulateGrad* const accumulator = find_accumulator(*node, input);
  if (accumulator == nullptr) return;
  const Tensor& parameter = accumulator->variable;
  if (!parameter.requires_grad() || !parameter.is_leaf() || at::isTensorSubclassLike(parameter)) return;

  State state;
  {
    const std::lock_guard guard(mutex);
    const auto found = registry().find(parameter.unsafeGetTensorImpl());
    if (found == registry().end()) return;
    GradientSlot& slot = *found->second;
    const Tensor& view = slot.view;
    const bool fits = view.device() == grad.device() &&
                      (view.scalar_type() == at::kDouble) == (grad.scalar_type() == at::kDouble) &&
                      view.scalar_type() == parameter.scalar_type() && view.sizes() == parameter.sizes();
    if (!slot.holder->open_ || slot.locked || slot.busy || !fits) return;
    slot.busy = true;
    state = slot.state;
    alpha_ = slot.holder->scale_;
    slot_ = found->second;
  }
  parameter_ = parameter;
  Tensor& old = parameter.mutable_grad();
  took_grad_ = lives_in(old, slot_->view);
  if (took_grad_) old.reset();
  if (state == State::kWritten || (state == State::kComplete && took_grad_))
    beta_ = 1.0;
  else if (took_grad_)
    beta_ = alpha_;
  if (state != State::kEmpty) wait_for(slot_->stream, current_stream(slot_->view.device()));
}

OptionalTensor SlotWrite::view() const { return found() ? OptionalTensor(slot_->view) : std::nullopt; }

void SlotWrite::done() {
  if (!found()) return;
  record_write(slot_->view);
  slot_->stream = current_stream(slot_->view.device());
  took_grad_ = false;
  const std::lock_guard guard(mutex);
  slot_->state = GradientSlot::State::kWritten;
}

void SlotWrite::release() {
  if (took_grad_ && !parameter_.grad().defined()) parameter_.mutable_grad() = slot_->view;  // the op has thrown
  const std::lock_guard guard(mutex);
  slot_->busy = false;
  slot_ = nullptr;
}

// A SlotWrite of a backward function in Python.
struct GradientSlotWrite : torch::CustomClassHolder {
  SlotWrite slot;

  GradientSlotWrite(int64_t input, const Tensor& grad) : slot(true, uint32_t(input), grad) {}
};

}  // namespace cuda_ext

TORCH_LIBRARY_FRAGMENT(CUDA_EXT_NAMESPACE, m) {
  using cuda_ext::GradientSlots;
  using cuda_ext::GradientSlotWrite;
  using Write = c10::intrusive_ptr<GradientSlotWrite>;
  m.class_<GradientSlots>("GradientSlots")
      .def(torch::init<>())
      .def("assign", &GradientSlots::assign)
      .def("open", &GradientSlots::open)
      .def("close", &GradientSlots::close)
      .def("collect", &GradientSlots::collect)
      .def("take", &GradientSlots::take)
      .def("lock", &GradientSlots::lock)
      .def("unlock_all", &GradientSlots::unlock_all)
      .def("release", &GradientSlots::release);
  m.class_<GradientSlotWrite>("GradientSlotWrite")
      .def(torch::init<int64_t, at::Tensor>())
      .def("view", [](const Write& self) { return self->slot.view(); })
      .def("alpha", [](const Write& self) { return self->slot.alpha(); })
      .def("beta", [](const Write& self) { return self->slot.beta(); })
      .def("done", [](const Write& self) { self->slot.done(); })
      .def("end", [](const Write& self) { self->slot.end(); });
  // Called in a hook: whether the current backward pass computes the gradients of all leaves, unlike
  // torch.autograd.grad and backward(inputs=...).
  m.def("_in_whole_backward() -> bool", [] {
    const auto* const asked = torch::autograd::get_current_graph_task_exec_info();
    return asked != nullptr && asked->empty();
  });
}
