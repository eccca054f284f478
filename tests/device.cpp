// A simulated device for PyTorch: its tensors are in the host's memory, but PyTorch takes them to be on another device.
//
// device.py builds this file, which is a PrivateUse1 backend. Each operator runs the CPU's kernel on the same bytes, in
// `run_on_cpu`. For a training loop, the device differs from a CPU as a GPU does: its tensors do not mix with tensors of
// other devices, its memory can run out, it has random number generators and autocast of its own, and backward passes
// run in a thread of their own, which PyTorch starts for every device with a `Guard`. Where a GPU would be synchronized,
// `synchronizes` calls a function of Python.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>
#include <optional>
#include <set>
#include <string>
using namespace at;
using std::optional;
using torch::jit::Stack;

namespace {
constexpr auto device_type = c10::DeviceType::PrivateUse1;
constexpr int n_devices = 2;
const c10::DispatchKeySet own_key(c10::DispatchKey::PrivateUse1);
thread_local c10::DeviceIndex current = 0;

Device resolved(optional<Device> d) { return d && d->has_index() ? *d : Device(device_type, current); }
bool is_ours(const Tensor& t) { return t.defined() && t.device().is_privateuseone(); }

// Synchronization

void (*listener)(const char*) = nullptr;   // a function of Python, which `listen` sets at the end of this file
void synchronizes(const std::string& why) { if (listener) listener(why.c_str()); }

// Memory

std::atomic<int64_t> used{0}, peak{0}, limit{INT64_MAX};   // bytes

struct DeviceAllocator final : c10::Allocator {
  static constexpr size_t header = 64;   // bytes in front of each block, which store its size; 64 keep it aligned
  static void release(void* p) {
    if (!p) return;
    auto* block = static_cast<char*>(p) - header;
    used -= *reinterpret_cast<int64_t*>(block);
    std::free(block);
  }
  DataPtr allocate(size_t n) override {
    Device here(device_type, current);
    if (!n) return {nullptr, nullptr, &release, here};
    TORCH_CHECK_WITH(OutOfMemoryError, used + int64_t(n) <= limit, "SIM out of memory. Tried to allocate ", n,
      " bytes; ", used.load(), " of ", limit.load(), " are in use");
    auto* block = static_cast<char*>(std::aligned_alloc(header, header + (n + header - 1) / header * header));
    *reinterpret_cast<int64_t*>(block) = n;
    used += n;
    if (used > peak) peak = used.load();
    return {block + header, block + header, &release, here};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(device_type, &allocator);

// What PyTorch requires of a device: a guard, which selects the current device, and hooks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return device_type; }
  Device getDevice() const override { return Device(device_type, current); }
  Device exchangeDevice(Device d) const override { auto old = getDevice(); current = d.index(); return old; }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return n_devices; }
  // the device has no streams, because the work of an operator is done when the operator returns
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

Generator generators[n_devices] = {at::detail::createCPUGenerator(7), at::detail::createCPUGenerator(8)};

// no `override`, because older versions of PyTorch do not have all of these methods
struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(DeviceIndex) const { return true; }
  DeviceIndex deviceCount() const { return n_devices; }
  DeviceIndex getCurrentDevice() const { return current; }
  const Generator& getDefaultGenerator(DeviceIndex i) const { return generators[i < 0 ? current : i]; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const {
    auto* impl = storage.unsafeGetStorageImpl();
    auto bigger = allocator.allocate(n);
    std::memcpy(bigger.get(), impl->data(), std::min(n, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(bigger));
    impl->set_nbytes(n);
  }
} hooks;

// The device's own kernels, which make tensors, change their shape without a copy, and copy them

// Return a CPU tensor that shares the memory of `t`
Tensor on_cpu(const Tensor& t) {
  if (!is_ours(t)) return t;
  auto options = t.options().device(kCPU).requires_grad(false);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), options);
}
bool has_float64 = true;   // `set_float64(false)` forbids double precision, which Apple's GPUs do not have
ScalarType supported(optional<ScalarType> dtype) {
  auto res = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(has_float64 || res != kDouble, "the SIM device has no double precision");
  return res;
}
Tensor empty(IntArrayRef size, optional<ScalarType> dtype, optional<Layout>, optional<Device> device, optional<bool>,
             optional<MemoryFormat> format) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, &allocator, own_key, supported(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype, optional<Layout>,
                     optional<Device> device, optional<bool>) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, own_key, supported(dtype));
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  // like Apple's GPUs, convert to the type of `to` on the device, before the copy
  if (is_ours(from) && !has_float64) supported(to.scalar_type());
  if (!non_blocking && to.is_cpu()) synchronizes("copy to the host");
  if (!non_blocking && from.is_cpu()) synchronizes("copy to the device");   // as with CUDA
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
Scalar item(const Tensor& t) {
  synchronizes("item");
  return on_cpu(t).item();
}
Tensor as_strided(const Tensor& t, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  return native::as_strided_tensorimpl(t, size, stride, offset);
}
Tensor view(const Tensor& t, IntArrayRef size) { return native::view(t, size); }
Tensor reshape_alias(const Tensor& t, IntArrayRef size, IntArrayRef stride) {
  return native::_reshape_alias(t, size, stride);
}
Tensor& set_storage(Tensor& t, Storage s, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return native::set_storage_cpu_(t, s, offset, size, stride);
}
const Tensor& resize(const Tensor& t, IntArrayRef size, optional<MemoryFormat>) {
  if (t.sizes() == size) return t;
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(at::empty(size, t.options()).storage());
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous(size);
  return t;
}

// All other operators run on the CPU, on the same bytes

// operators that accept CPU tensors together with tensors of a device
const std::set<std::string> mixes = {"aten::index.Tensor", "aten::_unsafe_index.Tensor", "aten::index_put_",
  "aten::index_put", "aten::_index_put_impl_"};
// operators that synchronize a GPU: they return a Python value, or a tensor whose size depends on values on the GPU
const std::set<std::string> synchronizing = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
  "aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor"};

// A call of an operator: replaces its arguments by CPU tensors, and its results by tensors of the device
struct Call {
  std::string name;                                     // of the operator
  optional<Device> device = {};                         // the device of the arguments
  std::vector<std::pair<Tensor, Tensor>> shared = {};   // (tensor of the device, CPU tensor with the same memory)
  bool has_cpu_tensor = false, has_mask = false;        // whether an argument is a CPU tensor, or an index is a mask

  Tensor argument(const Tensor& t) {
    if (!is_ours(t)) {
      if (t.defined() && t.is_cpu() && t.dim()) has_cpu_tensor = true;   // a CPU tensor of one number is allowed
      return t;
    }
    if (device && *device != t.device()) refuse(t.device());
    device = t.device();
    shared.emplace_back(t, on_cpu(t));
    return shared.back().second;
  }
  void refuse(Device other) const {
    TORCH_CHECK(mixes.count(name), "Expected all tensors to be on the same device, but found at least two devices, ",
      *device, " and ", other, "! (", name, ")");
  }
  IValue argument(const IValue& v) {
    if (v.isTensor()) return argument(v.toTensor());
    if (v.isDevice() && v.toDevice().is_privateuseone()) {
      device = resolved(v.toDevice());
      return Device(kCPU);
    }
    if (v.isGenerator() && v.toGenerator().device().is_privateuseone()) return IValue();
    if (v.isOptionalTensorList()) {
      c10::List<optional<Tensor>> res;
      for (optional<Tensor> t : v.toOptionalTensorList()) {
        if (t && is_ours(*t) && (t->scalar_type() == kBool || t->scalar_type() == kByte)) has_mask = true;
        res.push_back(t ? optional<Tensor>(argument(*t)) : t);
      }
      return res;
    }
    if (v.isTensorList()) {
      std::vector<Tensor> res;
      for (const Tensor& t : v.toTensorVector()) res.push_back(argument(t));
      return res;
    }
    if (v.isList() && v.toList().size() && v.toList().get(0).isTensorList()) {   // lists of lists, as `all_gather` takes
      c10::List<std::vector<Tensor>> res;
      for (const IValue& o : v.toList().vec()) res.push_back(argument(o).toTensorVector());
      return res;
    }
    return v;
  }
  Tensor result(const Tensor& t) {
    if (!device || !t.defined() || !t.is_cpu() || t.layout() != kStrided) return t;
    for (auto& [own, cpu] : shared) {
      if (!cpu.is_same(t)) continue;
      if (cpu.sizes() != own.sizes()) {   // the operator has resized its argument `out`
        own.resize_(cpu.sizes());
        on_cpu(own).copy_(cpu);
      }
      return own;
    }
    auto res = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, device, {});
    on_cpu(res).copy_(t);
    return res;
  }
};

// Run an operator that draws random numbers, with the generator `own` of the device in place of the CPU's
void draw(const c10::OperatorHandle& op, Stack* stack, Generator& own) {
  auto cpu = at::detail::getDefaultCPUGenerator();
  auto saved = cpu.get_state();
  cpu.set_state(own.get_state());
  try { op.callBoxed(stack); } catch (...) { cpu.set_state(saved); throw; }
  own.set_state(cpu.get_state());
  cpu.set_state(saved);
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& variant = schema.overload_name();
  Call call{schema.name() + (variant.empty() ? "" : "." + variant)};
  const auto first = stack->size() - schema.arguments().size();
  for (auto i = first; i < stack->size(); i++) (*stack)[i] = call.argument((*stack)[i]);
  if (call.device && call.has_cpu_tensor) call.refuse(kCPU);
  if (call.has_mask || synchronizing.count(call.name)) synchronizes(call.name);
  if (op.hasTag(at::Tag::nondeterministic_seeded)) draw(op, stack, generators[resolved(call.device).index()]);
  else op.callBoxed(stack);
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    IValue& v = (*stack)[i];
    if (v.isTensor()) v = call.result(v.toTensor());
    else if (v.isTensorList()) {
      std::vector<Tensor> res;
      for (const Tensor& t : v.toTensorVector()) res.push_back(call.result(t));
      v = res;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}
// Processes exchange tensors through a backend for CPU tensors, such as gloo, on the same bytes
TORCH_LIBRARY_IMPL(c10d, AutogradPrivateUse1, m) {
  for (auto* nm : {"allreduce_", "allgather_", "broadcast_"})
    m.impl(nm, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}

// Functions that `device.py` calls as `torch.ops.sim.…`
TORCH_LIBRARY(sim, m) {
  m.def("current_device", []() -> int64_t { return current; });
  m.def("set_device", [](int64_t i) { current = i; });
  m.def("get_rng_state", [](int64_t i) { return generators[i].get_state(); });
  m.def("set_rng_state(int i, Tensor state) -> ()", [](int64_t i, const Tensor& o) { generators[i].set_state(o); });
  m.def("manual_seed", [](int64_t seed) { for (auto& o : generators) o.set_current_seed(seed + 1000); });
  m.def("memory_allocated", []() -> int64_t { return used; });
  m.def("max_memory_allocated", []() -> int64_t { return peak; });
  m.def("reset_peak_memory_stats", []() { peak = used.load(); });
  m.def("set_float64", [](bool has) { has_float64 = has; });
  m.def("set_memory_limit", [](optional<int64_t> n) { limit = n.value_or(INT64_MAX); });
}

const bool registered = [] { at::RegisterPrivateUse1HooksInterface(&hooks); return true; }();
}

extern "C" void listen(void (*f)(const char*)) { listener = f; }
