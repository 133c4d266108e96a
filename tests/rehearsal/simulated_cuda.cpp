// A simulated GPU for a PyTorch that was built for CPUs: tensors with device "cuda" whose memory is the host's and whose kernels
// are the CPU's. What differs is what goes wrong on GPUs: tensors of two devices do not mix, each device draws from a generator
// of its own, memory can be pinned, copies to and from it are late, and whatever would make the host wait is noted. It cannot
// show speed, the rounding of GPU kernels, or what compilers, NCCL and drivers do. See docs/contributing.md.
#include <torch/extension.h>
#include <torch/library.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>

namespace {
using namespace at;
constexpr DeviceType kDevice = DeviceType::CUDA;
constexpr int kMaxDevices = 8;
int num_devices = 1;
thread_local DeviceIndex this_device = 0;

// ---- What is noted

std::mutex notes_mutex;
std::map<std::string, int64_t> notes;  // kind and what: how often
std::map<std::string, int64_t> launches;
py::object* watcher = nullptr;
thread_local int quiet = 0;  // within what stands for one kernel
thread_local bool is_watching = false;

void note(const std::string& kind, const std::string& what, int64_t bytes = 0) {
  if (quiet) return;
  {
    std::lock_guard<std::mutex> lock(notes_mutex);
    notes[kind + " " + what] += 1;
  }
  if (watcher == nullptr || is_watching) return;
  is_watching = true;
  py::gil_scoped_acquire gil;
  try {
    (*watcher)(kind, what, bytes);
  } catch (...) {
    is_watching = false;
    throw;
  }
  is_watching = false;
}
void note_launch(const std::string& name) {
  if (quiet) return;
  std::lock_guard<std::mutex> lock(notes_mutex);
  launches[name] += 1;
}
using Clock = std::chrono::steady_clock;
std::atomic<Clock::time_point> done_until{Clock::time_point()};  // what was queued before then is known to be done
void finish_copies(Clock::time_point until);
void wait(const std::string& what, int64_t bytes = 0, Clock::time_point until = Clock::now()) {
  finish_copies(until);
  done_until = std::max(done_until.load(), until);
  note("wait", what, bytes);
}

// ---- Memory

struct Stats { std::atomic<int64_t> allocated{0}, peak{0}, count{0}; };
Stats stats[kMaxDevices];
int64_t rounded(size_t size) { return ((int64_t)size + 511) / 512 * 512; }  // as CUDA's allocator of torch does

void grow(int device, int64_t size) {
  auto now = stats[device].allocated += size;
  auto peak = stats[device].peak.load();
  while (now > peak && !stats[device].peak.compare_exchange_weak(peak, now)) {}
  stats[device].count += 1;
}
struct Block { Storage adopted; void* own; int64_t size; int device; };
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  stats[block->device].allocated -= block->size;
  std::free(block->own);
  delete block;
}
struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    void* memory = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    auto* block = new Block{Storage(), memory, rounded(size), this_device};
    grow(this_device, block->size);
    return {memory, block, &release, Device(kDevice, this_device)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
DeviceAllocator device_allocator;

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // where memory starts: its size
void unpin(void* memory) {
  { std::lock_guard<std::mutex> lock(pinned_mutex); pinned.erase((const char*)memory); }
  std::free(memory);
}
struct PinnedAllocator final : Allocator {
  DataPtr allocate(size_t size) override {
    void* memory = std::aligned_alloc(64, std::max<size_t>(64, (size + 63) / 64 * 64));
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[(const char*)memory] = std::max<size_t>(size, 1);
    return {memory, memory, &unpin, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound((const char*)data);
  if (next == pinned.begin()) return false;
  --next;
  return (const char*)data < next->first + next->second;
}

// ---- Generators: CPU ones, each with a state of its own

struct DeviceGenerator final : GeneratorImpl {
  Generator cpu;
  explicit DeviceGenerator(DeviceIndex index)
      : GeneratorImpl(Device(kDevice, index), DispatchKeySet(DispatchKey::CUDA)), cpu(make_generator<CPUGeneratorImpl>(default_rng_seed_val)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  static DeviceType device_type() { return kDevice; }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};
const Generator& default_generator(DeviceIndex index) {
  static const std::vector<Generator> all = [] {
    std::vector<Generator> made;
    for (int i = 0; i < kMaxDevices; ++i) made.push_back(make_generator<DeviceGenerator>(i));
    return made;
  }();
  return all.at(index < 0 ? this_device : index);
}
Generator cpu_of(const Generator& generator) { return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu; }

// ---- Devices, streams and events: what is queued is done at once, so streams only have names, and events times

thread_local std::map<DeviceIndex, StreamId> current_streams;
std::atomic<StreamId> last_stream{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device full(Device device) { return Device(kDevice, device.has_index() ? device.index() : this_device); }
  DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return Device(kDevice, this_device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "CUDA error: invalid device ordinal ", (int)device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.has_index()) this_device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, full(device), current_streams[full(device).index()]); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, full(device), 0); }
  Stream getNewStream(Device device, int = 0) const override { return Stream(Stream::UNSAFE, full(device), ++last_stream); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait("for a stream"); }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr || *static_cast<Clock::time_point*>(event) <= done_until.load()) return;
    wait("for an event", 0, *static_cast<Clock::time_point*>(event));
  }
  void synchronizeDevice(const DeviceIndex) const override { wait("for the device"); }
  double elapsedTime(void* one, void* other, const DeviceIndex) const override {
    if (one == nullptr || other == nullptr) return 0;
    auto between = *static_cast<Clock::time_point*>(other) - *static_cast<Clock::time_point*>(one);
    return std::chrono::duration<double, std::milli>(between).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  const Generator& getDefaultGenerator(DeviceIndex index = -1) const override { return default_generator(index); }
  Generator getNewGenerator(DeviceIndex index = -1) const override { return make_generator<DeviceGenerator>(index < 0 ? this_device : index); }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, this_device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex index) const override { return index >= 0 && index < num_devices; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  int getNumGPUs() const override { return num_devices; }
  void deviceSynchronize(DeviceIndex) const override { wait("for the device"); }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex current_device() const override { return this_device; }
  DeviceIndex getCurrentDevice() const override { return this_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kDevice, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = this_device;
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

// ---- The same memory as a CPU tensor, and back

void take_shape(const Tensor& to, const Tensor& from) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
}
Tensor on_cpu(const Tensor& t) {
  Storage storage(Storage::use_byte_size_t(), t.storage().nbytes(),
                  DataPtr(const_cast<void*>(t.storage().data()), Device(DeviceType::CPU)), c10::GetCPUAllocator(), true);
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), t.dtype());
  take_shape(out, t);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}
DataPtr adopt(Storage cpu, int device) {
  auto size = rounded(cpu.nbytes());
  void* memory = cpu.mutable_data();
  grow(device, size);
  return {memory, new Block{std::move(cpu), nullptr, size, device}, &release, Device(kDevice, (DeviceIndex)device)};
}
Tensor on_device(const Tensor& cpu, int device) {
  Storage storage(Storage::use_byte_size_t(), cpu.storage().nbytes(), adopt(cpu.storage(), device), &device_allocator, true);
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), cpu.dtype());
  take_shape(out, cpu);
  return out;
}

// The arguments of one kernel, on the device and as the CPU's kernel sees them.
struct Arguments {
  std::vector<std::pair<Tensor, Tensor>> pairs;
  int device = -1;
  bool is_view = true;  // all results share memory with arguments, and none was written to: nothing is launched

  Tensor on_cpu(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    for (auto& [original, alias] : pairs) if (original.is_same(t)) return alias;
    if (device < 0) device = t.device().index();
    TORCH_CHECK(device == t.device().index(), "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                device, " and cuda:", (int)t.device().index(), "!");
    auto alias = ::on_cpu(t);
    for (auto& [original, other] : pairs)  // one storage stays one storage
      if (original.storage().is_alias_of(t.storage())) { alias.unsafeGetTensorImpl()->set_storage_keep_dtype(other.storage()); break; }
    pairs.emplace_back(t, alias);
    return alias;
  }
  Tensor back(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& [original, alias] : pairs)
      if (alias.is_same(t)) { is_view = false; settle(original, alias); return original; }
    for (auto& [original, alias] : pairs) {
      if (!alias.storage().is_alias_of(t.storage())) continue;
      auto out = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(original.storage()), original.key_set(), t.dtype());
      take_shape(out, t);
      return out;
    }
    is_view = false;
    return on_device(t, device < 0 ? this_device : device);
  }
  static void settle(const Tensor& original, const Tensor& alias) {
    if (alias.storage().data() != original.storage().data()) {  // a result given as out= was resized
      auto* storage = original.storage().unsafeGetStorageImpl();
      auto size = alias.storage().nbytes();
      storage->set_data_ptr_noswap(adopt(alias.storage(), original.device().index()));
      storage->set_nbytes(size);
    }
    original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
};

// ---- Late copies

struct LateCopy { Tensor host, kept; bool is_to_host; Clock::time_point queued; };
std::vector<LateCopy> late_copies;
std::mutex late_mutex;
void add_late(const Tensor& host, const Tensor& kept, bool is_to_host) {
  std::lock_guard<std::mutex> lock(late_mutex);
  late_copies.push_back({host, kept, is_to_host, Clock::now()});
}
void finish_copies(Clock::time_point until) {
  std::vector<LateCopy> now;
  {
    std::lock_guard<std::mutex> lock(late_mutex);
    auto later = std::find_if(late_copies.begin(), late_copies.end(), [&](auto& copy) { return copy.queued > until; });
    now.assign(late_copies.begin(), later);
    late_copies.erase(late_copies.begin(), later);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& copy : now) {
    if (copy.is_to_host) copy.host.copy_(copy.kept);
    else if (!at::equal(copy.host, copy.kept)) note("race", "pinned memory was written to before its copy to the GPU was complete");
  }
}

// ---- All kernels

const std::set<std::string> kWaits = {  // to learn a value, or the size of a result
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique2", "aten::_unique", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::equal", "aten::is_nonzero", "aten::item",
    "aten::repeat_interleave.Tensor", "aten::linalg_inv_ex.inverse", "aten::multinomial"};
const std::set<std::string> kTakesHostTensors = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
    "aten::index.Tensor_out", "aten::_fused_adamw_", "aten::set_.source_Storage_storage_offset", "aten::is_set_to"};

template <class Function> void each_tensor(c10::IValue& value, const Function& function) {  // and replace it
  if (value.isTensor()) value = function(value.toTensor());
  else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorList()) list.push_back(function(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> t : value.toOptionalTensorList()) list.push_back(t ? std::optional<Tensor>(function(*t)) : t);
    value = list;
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  const auto begin = stack->size() - schema.arguments().size();
  const bool is_indexing = name.rfind("aten::index.", 0) == 0 || name.rfind("aten::index_put", 0) == 0 || name.rfind("aten::_index_put_impl", 0) == 0;
  bool has_device_tensor = false, has_mask = false, has_host_index = false, is_given_generator = false;
  std::string host_tensor;
  int target = -1;
  Arguments arguments;
  at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    const bool is_index = is_indexing && value.isOptionalTensorList();
    each_tensor(value, [&](const Tensor& t) {
      if (!t.defined()) return t;
      has_device_tensor |= t.is_cuda();
      if (t.is_cpu() && t.dim() > 0) host_tensor = c10::str(t.sizes(), " ", t.dtype());
      has_mask |= is_index && (t.scalar_type() == kBool || t.scalar_type() == kByte);
      has_host_index |= is_index && t.is_cpu();
      return t;
    });
  }
  TORCH_CHECK(!has_device_tensor || host_tensor.empty() || kTakesHostTensors.count(name),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (", name,
              " got a tensor of ", host_tensor, " on the CPU)");
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    each_tensor(value, [&](const Tensor& t) { return arguments.on_cpu(t); });
    if (value.isDevice()) {
      target = value.toDevice().index();
      value = Device(DeviceType::CPU);
    } else if (schema.arguments()[i - begin].name() == "generator") {
      is_given_generator = true;
      const Generator given = value.isGenerator() ? value.toGenerator() : default_generator(-1);
      TORCH_CHECK(given.device().type() == kDevice, "Expected a 'cuda' device type for generator but found 'cpu'");
      value = cpu_of(given);
    }
  }
  if (arguments.device < 0) arguments.device = target;
  if (kWaits.count(name) || has_mask) wait(name);
  if (has_host_index) wait(name + " with an index on the host");
  if (!is_given_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {  // lend the CPU our generator's state
    auto own = cpu_of(default_generator(-1)), host = at::detail::getDefaultCPUGenerator();
    auto kept = host.get_state();
    host.set_state(own.get_state());
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    own.set_state(host.get_state());
    host.set_state(kept);
  } else {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  if (schema.returns().empty()) arguments.is_view = false;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    each_tensor((*stack)[i], [&](const Tensor& t) { return arguments.back(t); });
  for (auto& [original, alias] : arguments.pairs)
    if (alias.storage().data() != original.storage().data()) arguments.settle(original, alias);
  if (!arguments.is_view) note_launch(name);
}

// ---- What no CPU kernel can stand for

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device, std::optional<bool> pin,
             std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                     std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor to = self.is_cuda() ? on_cpu(self) : self, from = source.is_cuda() ? on_cpu(source) : source;
  const bool is_async = non_blocking && is_pinned(self.is_cuda() ? from.storage().data() : to.storage().data());
  if (self.is_cuda() && source.is_cuda()) {
    note_launch("aten::copy_");
    to.copy_(from);
  } else if (self.is_cuda()) {
    // From pageable memory without blocking: torch's copy returns when the memory has been read, behind all that is queued.
    if (is_async) note("copy", "to the GPU", source.nbytes());
    else wait(non_blocking ? "copy to the GPU, non_blocking from pageable memory" : "copy to the GPU", source.nbytes());
    to.copy_(from);
    if (is_async) add_late(from, from.clone(), false);
  } else if (is_async && to.numel()) {
    note("copy", "to the host", source.nbytes());
    auto kept = from.clone();
    std::memset(to.mutable_data_ptr(), 0xff, to.is_contiguous() ? to.nbytes() : to.element_size());  // it has not arrived yet
    add_late(to, kept, true);
  } else {
    wait("copy to the host", source.nbytes());
    to.copy_(from);
  }
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) { Tensor out = to; return copy_(out, self, non_blocking); }
Scalar local_scalar_dense(const Tensor& self) {
  wait("aten::_local_scalar_dense");
  at::AutoDispatchBelowADInplaceOrView below;
  return on_cpu(self).item();
}
const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat> format) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto alias = on_cpu(self);
  alias.resize_(size, format);
  Arguments::settle(self, alias);
  return self;
}
Tensor& set_storage(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride.empty() ? c10::contiguous_strides(size) : c10::DimVector(stride), offset);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_empty(Tensor& self) {
  return set_storage(self, Storage(Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true), 0, {0}, {1});
}
void resize_bytes(Storage storage, int64_t size) {
  auto fresh = device_allocator.allocate(size);
  if (auto kept = std::min<size_t>(storage.nbytes(), size)) std::memcpy(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}
void record_stream(Tensor&, Stream) {}
int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("_fused_sdp_choice", sdp_choice);  // the kernel of many small ones, which also takes masks
}
void take_composites() {  // made of others in a build for CPUs, kernels of their own on GPUs
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& operator_name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto name = c10::toString(operator_name);
    const bool is_one = name.rfind("aten::_foreach_", 0) == 0 || name == "aten::native_layer_norm" || name == "aten::native_group_norm" ||
                        name == "aten::nll_loss_forward" || name == "aten::silu_backward" || name == "aten::_log_softmax" ||
                        name == "aten::convolution" || name == "aten::convolution_backward";
    if (is_one && name.find("_out") == std::string::npos && name.find(".out") == std::string::npos)
      library.impl(name.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

// ---- NCCL: Gloo on the same memory, with NCCL's rules

using c10d::Work;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;
struct DoneWork : Work {
  Tensors tensors;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  DoneWork(c10d::OpType kind, Tensors given) : Work(-1, kind), tensors(std::move(given)) {
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<Device>{Device(kDevice, this_device)});
    future->markCompleted(c10::IValue(tensors));
    finish();
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return true; }
  Tensors result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};
struct LateWork : Work {  // of a message between two processes, which may both send first
  WorkPtr inner;
  Tensors tensors;
  LateWork(WorkPtr work, Tensors kept) : inner(std::move(work)), tensors(std::move(kept)) {}
  bool isCompleted() override { return inner->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override { return inner->wait(timeout); }
  Tensors result() override { return tensors; }
};
struct SimulatedNccl : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  SimulatedNccl(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size) : Backend(rank, size), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  static Tensor host(const Tensor& t, const char* what) {
    TORCH_CHECK(t.is_cuda(), "NCCL: ", what, " of a tensor on ", t.device());
    TORCH_CHECK(t.device().index() == this_device, "NCCL: ", what, " of a tensor on ", t.device(), " while cuda:", (int)this_device, " is current");
    TORCH_CHECK(t.is_contiguous() || t.is_non_overlapping_and_dense(), "Tensors must be contiguous (", what, ")");
    note("collective", what, t.nbytes());
    at::AutoDispatchBelowADInplaceOrView below;
    auto alias = on_cpu(t);
    return alias.is_contiguous() ? alias : alias.as_strided({alias.numel()}, {1}, alias.storage_offset());
  }
  static Tensors hosts(const Tensors& tensors, const char* what) {
    Tensors all;
    for (auto& t : tensors) all.push_back(host(t, what));
    return all;
  }
  static Lists hosts(const Lists& lists, const char* what) {
    Lists all;
    for (auto& list : lists) all.push_back(hosts(list, what));
    return all;
  }
  static WorkPtr done(c10d::OpType kind, Tensors tensors) { return c10::make_intrusive<DoneWork>(kind, std::move(tensors)); }
  template <class Options, class Run> void reduced(const Options& given, const Tensors& results, const Run& run) {  // Gloo has no AVG
    auto options = given;
    const bool is_mean = given.reduceOp.op_ == c10d::ReduceOp::AVG;
    if (is_mean) options.reduceOp = c10d::ReduceOp::SUM;
    run(options)->wait();
    if (is_mean) for (auto result : results) result.div_(size_);
  }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& options) override {
    auto h = hosts(t, "broadcast");
    gloo->broadcast(h, options)->wait();
    return done(c10d::OpType::BROADCAST, t);
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& options) override {
    auto h = hosts(t, "all_reduce");
    reduced(options, h, [&](auto& o) { return gloo->allreduce(h, o); });
    return done(c10d::OpType::ALLREDUCE, t);
  }
  WorkPtr allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& one : t) { Tensors single{one}; allreduce(single, options); }
    return done(c10d::OpType::ALLREDUCE, t);
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& options) override {
    auto h = hosts(t, "reduce");
    gloo->reduce(h, options)->wait();
    return done(c10d::OpType::REDUCE, t);
  }
  WorkPtr allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto h = hosts(out, "all_gather");
    auto own = hosts(in, "all_gather");
    gloo->allgather(h, own, options)->wait();
    return done(c10d::OpType::ALLGATHER, out[0]);
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto h = host(out, "all_gather"), own = host(in, "all_gather");
    gloo->_allgather_base(h, own, options)->wait();
    return done(c10d::OpType::_ALLGATHER_BASE, {out});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < out.size(); ++i) _allgather_base(out[i], in[i], options);
    return done(c10d::OpType::_ALLGATHER_BASE, out);
  }
  WorkPtr reduce_scatter(Tensors& out, Lists& in, const c10d::ReduceScatterOptions& options) override {
    auto h = hosts(out, "reduce_scatter");
    auto all = hosts(in, "reduce_scatter");
    reduced(options, h, [&](auto& o) { return gloo->reduce_scatter(h, all, o); });
    return done(c10d::OpType::REDUCE_SCATTER, out);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto h = host(out, "reduce_scatter"), all = host(in, "reduce_scatter");
    reduced(options, {h}, [&](auto& o) { return gloo->_reduce_scatter_base(h, all, o); });
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {out});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < out.size(); ++i) _reduce_scatter_base(out[i], in[i], options);
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, out);
  }
  WorkPtr gather(Lists& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto h = hosts(out, "gather");
    auto own = hosts(in, "gather");
    gloo->gather(h, own, options)->wait();
    return done(c10d::OpType::GATHER, out.empty() ? in : out[0]);
  }
  WorkPtr scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& options) override {
    auto h = hosts(out, "scatter");
    auto all = hosts(in, "scatter");
    gloo->scatter(h, all, options)->wait();
    return done(c10d::OpType::SCATTER, out);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto h = host(out, "all_to_all"), own = host(in, "all_to_all");
    gloo->alltoall_base(h, own, out_sizes, in_sizes, options)->wait();
    return done(c10d::OpType::ALLTOALL_BASE, {out});
  }
  WorkPtr send(Tensors& t, int to, int tag) override {
    auto h = hosts(t, "send");
    for (auto& x : h) x = x.clone();  // what is computed next may overwrite it; on a GPU the stream's order prevents that
    return c10::make_intrusive<LateWork>(gloo->send(h, to, tag), h);
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    auto h = hosts(t, "recv");
    auto kept = t;
    kept.insert(kept.end(), h.begin(), h.end());
    return c10::make_intrusive<LateWork>(gloo->recv(h, from, tag), kept);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    note("collective", options.device_ids.empty() && !options.device ? "barrier without a device" : "barrier");
    c10d::BarrierOptions plain;
    plain.timeout = options.timeout;
    gloo->barrier(plain)->wait();
    return done(c10d::OpType::BARRIER, {});
  }
};
struct HostTimer : c10d::Timer {  // DDP asks for one of the device
  explicit HostTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimeRef(start), to = getTimeRef(end);
    return to < from ? std::nullopt : std::optional<int64_t>(to - from);
  }
};
}  // namespace
namespace c10d { C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer) }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  take_composites();
  c10::SetAllocator(kDevice, &device_allocator, 10);
  if (!at::detail::getCUDAHooks().hasCUDA()) {  // importing torch has asked for the hooks before; they have no members
    static Hooks hooks{CUDAHooksArgs{}};
    *reinterpret_cast<void**>(const_cast<CUDAHooksInterface*>(&at::detail::getCUDAHooks())) = *reinterpret_cast<void**>(&hooks);
  }
  m.def("make_nccl", [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimulatedNccl>(gloo, rank, size);
  });
  m.def("resize_bytes", &resize_bytes);
  m.def("set_device_count", [](int count) { TORCH_CHECK(0 < count && count <= kMaxDevices); num_devices = count; });
  m.def("device_count", [] { return num_devices; });
  m.def("current_device", [] { return (int)this_device; });
  m.def("set_device", [](int index) { Guard().setDevice(Device(kDevice, index)); });
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("notes", [] { std::lock_guard<std::mutex> lock(notes_mutex); return notes; });
  m.def("launches", [] { std::lock_guard<std::mutex> lock(notes_mutex); return launches; });
  m.def("note_launch", &note_launch);
  m.def("quiet", [](int change) { quiet += change; });
  m.def("wait", [](const std::string& what) { py::gil_scoped_release no_gil; wait(what, 0); });
  m.def("watch", [](py::object function) { delete watcher; watcher = function.is_none() ? nullptr : new py::object(function); });
  m.def("memory", [](int device) { return std::make_tuple(stats[device].allocated.load(), stats[device].peak.load(), stats[device].count.load()); });
  m.def("reset_peak", [](int device) { stats[device].peak = stats[device].allocated.load(); });
}
