// A norm in eager mode with no Python between the call and the launch.
//
// What this file may do is copied from decisions that Python made: the first call of a kind asks
// `resolve_forward` or `resolve_backward` (shortcut.py) which verified kernel serves it, and later
// calls of that kind launch it. Whatever is not an everyday call (subclasses, transforms, tracing,
// strided rows, kernels of two launches, CUDA graph capture of shared scratch) is handed back to
// Python, so there is one set of rules. See: docs/design.md, "Without Python between".

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include <ATen/autocast_mode.h>
#include <ATen/core/TorchDispatchUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace py = pybind11;
using at::Tensor;

namespace {

// ---- The driver, found where torch has already loaded it ----------------------------------------

struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*,
                void**, void**) = nullptr;
  int (*launch_cooperative)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, void*, void**) = nullptr;
  int (*is_capturing)(void*, int*) = nullptr;
  int (*current_context)(void**) = nullptr;
  int (*retain_primary_context)(void**, int) = nullptr;
  int (*set_context)(void*) = nullptr;
  int (*error_text)(int, const char**) = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    TORCH_CHECK(library, "fastnorm: libcuda.so.1 cannot be opened: ", dlerror());
    find(library, "cuLaunchKernel", launch);
    find(library, "cuLaunchCooperativeKernel", launch_cooperative);
    find(library, "cuStreamIsCapturing", is_capturing);
    find(library, "cuCtxGetCurrent", current_context);
    find(library, "cuDevicePrimaryCtxRetain", retain_primary_context);
    find(library, "cuCtxSetCurrent", set_context);
    find(library, "cuGetErrorString", error_text);
  }

  template <typename F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    TORCH_CHECK(function, "fastnorm: libcuda.so.1 has no ", name);
  }

  void check(int result) const {
    if (result == 0) return;
    const char* text = "unknown error";
    error_text(result, &text);
    TORCH_CHECK(false, "fastnorm: the CUDA driver answered ", result, ": ", text);
  }
};

const Driver& driver() {
  static const Driver instance;
  return instance;
}

// ---- What Python decided ------------------------------------------------------------------------

// A verified kernel. Without a `function`, calls go through Python's operators.
struct Kernel {
  void* function = nullptr;
  unsigned threads = 0, shared_bytes = 0;
  bool cooperative = false;
  int64_t rows_per_block = 1, most_blocks = 0, split = 1;  // as Plan.grid
  int64_t hidden = 0, row_stride = 0;                      // row_stride in the plan's units
  int64_t accumulators = 0;
  at::ScalarType out_dtype = at::kFloat;
  bool centered = false;
  bool serves = false;
  std::string route;
  std::atomic<int64_t> calls{0};

  int64_t programs(int64_t rows) const {
    const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
    return std::min(blocks, most_blocks) * split;
  }
};

// Everything that a decision depends on: hidden size, semantics, autocast choice, and small facts.
using Key = std::array<uint64_t, 4>;

struct Python {
  py::object resolve_forward, resolve_backward, forward, backward, differentiable, scratch;
};

struct Scratch {
  Tensor partials, semaphore, slots;
};

Python* python = nullptr;  // never freed: threads of autograd's may outlive the interpreter
std::mutex mutex;          // guards the two maps; never held while waiting for Python
std::map<Key, Kernel> kernels[2];
std::map<std::pair<int, void*>, Scratch> kept;
std::atomic<bool> paused{true};

constexpr int FORWARD = 0, BACKWARD = 1;
constexpr int64_t SLOTS_PER_PROGRAM = 8;           // as kernels/launch.py
constexpr int64_t LARGEST_KEPT = int64_t{64} << 20;  // as kernels/launch.py

py::object wrap(const Tensor& t) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
}

// Runs `f` with the interpreter's lock. An error of Python's leaves as torch's own exception for it,
// which autograd's thread can hand to the caller's.
template <typename F>
auto with_python(F&& f) {
  const py::gil_scoped_acquire gil;
  try {
    return f();
  } catch (py::error_already_set& error) {
    error.restore();
    python_error torchs;
    torchs.persist();
    throw torchs;
  }
}

uint64_t dtype_or_none(const Tensor& t) {
  return t.defined() ? static_cast<uint64_t>(t.scalar_type()) : 255;
}

bool aligned(const Tensor& t) {
  return !t.defined() || reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// Dense tensors of a CPU or a GPU that own their values: no subclass, no wrapper, no lazy negation.
bool plain(const Tensor& t) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet usual =
      c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                           DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}) |
      c10::autograd_dispatch_keyset;
  return (t.key_set().raw_repr() & ~usual.raw_repr()) == 0;
}

bool beside(const Tensor& t, const Tensor& x) {
  return !t.defined() || (plain(t) && t.device() == x.device() && t.is_contiguous());
}

// Whether something wants to see calls of operators, or asks for other derivatives.
bool watched() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::dispatch_mode_enabled() || torch::jit::tracer::isTracing() ||
      torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

// Python's answer: None, where it serves such calls itself, or a dict of what is above.
void read(const py::object& answer, Kernel& kernel) {
  if (answer.is_none()) return;
  const auto facts = py::cast<py::dict>(answer);
  kernel.serves = true;
  kernel.function = reinterpret_cast<void*>(facts["function"].cast<uintptr_t>());
  kernel.threads = facts["threads"].cast<unsigned>();
  kernel.shared_bytes = facts["shared_bytes"].cast<unsigned>();
  kernel.cooperative = facts["cooperative"].cast<bool>();
  kernel.rows_per_block = facts["rows_per_block"].cast<int64_t>();
  kernel.most_blocks = facts["most_blocks"].cast<int64_t>();
  kernel.split = facts["split"].cast<int64_t>();
  kernel.hidden = facts["hidden"].cast<int64_t>();
  kernel.row_stride = facts["row_stride"].cast<int64_t>();
  kernel.accumulators = facts["accumulators"].cast<int64_t>();
  kernel.centered = facts["centered"].cast<bool>();
  kernel.route = facts["route"].cast<std::string>();
  const auto dtype = facts["out_dtype"];
  kernel.out_dtype = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

Kernel* find(int pass, const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = kernels[pass].find(key);
  return found == kernels[pass].end() ? nullptr : &found->second;
}

// Stores an answer. The caller holds the GIL.
Kernel* learn(int pass, const Key& key, const py::object& answer) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto [place, is_new] = kernels[pass].try_emplace(key);
  if (is_new) read(answer, place->second);
  return &place->second;
}

// ---- Launching ----------------------------------------------------------------------------------

struct Arguments {
  std::array<uint64_t, 16> values{};
  std::array<void*, 18> pointers{};
  size_t count = 0;

  void add(uint64_t value) {
    values[count] = value;
    ++count;
  }
  void add(const Tensor& t, const Tensor& stand_in) {
    add(reinterpret_cast<uint64_t>((t.defined() ? t : stand_in).const_data_ptr()));
  }
  void add(float value) {
    std::memcpy(&values[count], &value, sizeof value);
    ++count;
  }
  // Triton's kernels end in two scratch pointers, which ours do not use.
  void** finish() {
    add(uint64_t{0});
    add(uint64_t{0});
    for (size_t i = 0; i < count; ++i) pointers[i] = &values[i];
    return pointers.data();
  }
};

struct Stream {
  int device;
  void* handle;
};

bool capturing(const Stream& stream) {
  int status = 0;
  driver().check(driver().is_capturing(stream.handle, &status));
  return status != 0;
}

// The device's current stream; false where another device is current, which Python handles.
bool current_stream(const Tensor& x, Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  if (guard.getDevice() != x.device()) return false;
  stream = {x.device().index(), guard.getStream(x.device()).native_handle()};
  // A thread may be new to the device (autograd's, before anything else ran there), and the driver
  // dies of questions about the default stream without a context.
  const Driver& d = driver();
  void* context = nullptr;
  d.check(d.current_context(&context));
  if (context == nullptr) {
    d.check(d.retain_primary_context(&context, stream.device));
    d.check(d.set_context(context));
  }
  return true;
}

// Whether Python may be asked for a decision: under graph capture it could not compile.
bool decidable(const Tensor& x) {
  Stream stream{};
  return !x.is_cuda() || (current_stream(x, stream) && !capturing(stream));
}

void launch(const Kernel& kernel, const Stream& stream, int64_t programs, Arguments& arguments) {
  const Driver& d = driver();
  const auto grid = static_cast<unsigned>(programs);
  void** parameters = arguments.finish();
  d.check(kernel.cooperative
              ? d.launch_cooperative(kernel.function, grid, 1, 1, kernel.threads, 1, 1,
                                     kernel.shared_bytes, stream.handle, parameters)
              : d.launch(kernel.function, grid, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes,
                         stream.handle, parameters, nullptr));
}

// Scratch of this stream with room enough, or nothing where Python must launch (capture, size).
bool scratch_for(const Tensor& x, const Stream& stream, int64_t floats, int64_t slots,
                 Scratch& scratch) {
  if (capturing(stream) || floats * 4 > LARGEST_KEPT) return false;
  const auto place = std::make_pair(stream.device, stream.handle);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = kept.find(place);
    if (found != kept.end() && found->second.partials.numel() >= floats &&
        found->second.slots.numel() >= slots) {
      scratch = found->second;
      return true;
    }
  }
  scratch = with_python([&] {
    const py::object made = python->scratch(
        wrap(x), reinterpret_cast<uintptr_t>(stream.handle), floats, slots);
    return Scratch{THPVariable_Unpack(made.attr("partials").ptr()),
                   THPVariable_Unpack(made.attr("semaphore").ptr()),
                   THPVariable_Unpack(made.attr("slots").ptr())};
  });
  Scratch replaced = scratch;  // dies after the lock: tensors that Python made may wait for Python
  const std::lock_guard<std::mutex> lock(mutex);
  std::swap(kept[place], replaced);
  return true;
}

// ---- Forward ------------------------------------------------------------------------------------

// One call, past all checks.
struct Call {
  Kernel* kernel;
  int64_t normalized_ndim;
  double eps;
  PyObject* semantics;  // interned and kept for good
};

bool launch_forward(const Call& call, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    Tensor& y, Tensor& stats) {
  const Kernel& k = *call.kernel;
  Stream stream{};
  if (k.function == nullptr || !current_stream(x, stream)) return false;
  const int64_t rows = x.numel() / k.hidden, programs = k.programs(rows);
  Scratch scratch;
  const int64_t slots = k.split > 1 ? programs * SLOTS_PER_PROGRAM : 0;
  if (slots > 0 && !scratch_for(x, stream, 0, slots, scratch)) return false;
  std::vector<int64_t> shape{k.centered ? 2 : 1};
  const auto leading = x.sizes().slice(0, x.dim() - call.normalized_ndim);
  shape.insert(shape.end(), leading.begin(), leading.end());
  y = at::empty_like(x, x.options().dtype(k.out_dtype));
  stats = at::empty(shape, x.options().dtype(at::kFloat));
  Arguments arguments;
  arguments.add(x, x);
  arguments.add(weight, x);
  arguments.add(bias, x);
  arguments.add(y, x);
  arguments.add(stats, x);
  if (slots > 0) {
    arguments.add(scratch.semaphore, x);
    arguments.add(scratch.slots, x);
  }
  arguments.add(static_cast<uint64_t>(k.row_stride));
  arguments.add(static_cast<uint64_t>(rows));
  arguments.add(static_cast<float>(call.eps));
  launch(k, stream, programs, arguments);
  ++call.kernel->calls;
  return true;
}

std::pair<Tensor, Tensor> run_forward(const Call& call, const Tensor& x, const Tensor& weight,
                                      const Tensor& bias) {
  Tensor y, stats;
  if (launch_forward(call, x, weight, bias, y, stats)) return {y, stats};
  return with_python([&] {
    const auto dtype = py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(call.kernel->out_dtype)));
    const py::tuple results = python->forward(
        wrap(x), wrap(weight), wrap(bias), call.normalized_ndim, call.eps,
        py::reinterpret_borrow<py::object>(call.semantics), dtype);
    return std::pair(THPVariable_Unpack(results[0].ptr()), THPVariable_Unpack(results[1].ptr()));
  });
}

// ---- Backward -----------------------------------------------------------------------------------

using Mask = std::array<bool, 3>;

bool launch_backward(const Call& call, const Tensor& dy, const Tensor& x, const Tensor& weight,
                     const Tensor& bias, const Tensor& stats, const Mask& mask,
                     std::array<Tensor, 3>& grads) {
  const Kernel& k = *call.kernel;
  Stream stream{};
  if (k.function == nullptr || !current_stream(x, stream)) return false;
  const int64_t rows = x.numel() / k.hidden, programs = k.programs(rows);
  const int64_t floats = programs / k.split * k.hidden;
  const int64_t slots = k.split > 1 ? programs * SLOTS_PER_PROGRAM : 0;
  Scratch scratch;
  if (k.cooperative && !scratch_for(x, stream, floats * k.accumulators, slots, scratch)) {
    return false;
  }
  if (mask[0]) grads[0] = at::empty_like(x);
  if (mask[1]) grads[1] = at::empty_like(weight);
  if (mask[2]) grads[2] = at::empty_like(bias);
  const auto partials = k.cooperative
      ? reinterpret_cast<uint64_t>(scratch.partials.const_data_ptr())
      : 0;
  Arguments arguments;
  arguments.add(dy, x);
  arguments.add(x, x);
  arguments.add(weight, x);
  arguments.add(stats, x);
  arguments.add(grads[0], x);
  arguments.add(partials);
  arguments.add(partials + (mask[1] ? 4 * static_cast<uint64_t>(floats) : 0));
  arguments.add(grads[1], x);
  arguments.add(grads[2], x);
  arguments.add(scratch.semaphore, x);
  if (slots > 0) arguments.add(scratch.slots, x);
  arguments.add(static_cast<uint64_t>(k.row_stride));
  arguments.add(static_cast<uint64_t>(k.row_stride));
  arguments.add(static_cast<uint64_t>(rows));
  launch(k, stream, programs, arguments);
  ++call.kernel->calls;
  return true;
}

py::tuple mask_of(const Mask& mask) { return py::make_tuple(mask[0], mask[1], mask[2]); }

// The kernel for a backward call of this kind, asking Python the first time; null: Python runs it.
Kernel* backward_kernel(const Call& call, const Tensor& dy, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& stats, const Mask& mask) {
  const bool usual = !paused && !watched() && plain(x) && x.is_contiguous() && plain(dy) &&
      dy.device() == x.device() && dy.is_contiguous() && dy.sizes() == x.sizes() &&
      beside(weight, x) && beside(bias, x) && beside(stats, x) && aligned(stats);
  if (!usual) return nullptr;
  int64_t hidden = 1;
  for (const auto size : x.sizes().slice(x.dim() - call.normalized_ndim)) hidden *= size;
  const bool is_aligned = aligned(x) && aligned(dy) && aligned(weight);
  const uint64_t facts = static_cast<uint64_t>(x.scalar_type()) |
      static_cast<uint64_t>(dy.scalar_type()) << 8 | dtype_or_none(weight) << 16 |
      dtype_or_none(bias) << 24 | static_cast<uint64_t>(static_cast<uint8_t>(x.get_device())) << 32 |
      static_cast<uint64_t>(is_aligned) << 40 |
      static_cast<uint64_t>(mask[0] | mask[1] << 1 | mask[2] << 2) << 48;
  const Key key{static_cast<uint64_t>(hidden), reinterpret_cast<uint64_t>(call.semantics), 0, facts};
  Kernel* kernel = find(BACKWARD, key);
  if (kernel == nullptr && decidable(x)) {
    kernel = with_python([&] {
      return learn(BACKWARD, key,
                   python->resolve_backward(
                       wrap(dy), wrap(x), wrap(weight), wrap(bias), hidden,
                       py::reinterpret_borrow<py::object>(call.semantics), mask_of(mask)));
    });
  }
  return kernel != nullptr && kernel->serves ? kernel : nullptr;
}

struct NormBackward : torch::autograd::Function<NormBackward> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                        const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        const Call& call) {
    const Tensor w = weight.value_or(Tensor()), b = bias.value_or(Tensor());
    auto [y, stats] = run_forward(call, x, w, b);
    ctx->save_for_backward({x, w, b, stats});
    ctx->saved_data["normalized_ndim"] = call.normalized_ndim;
    ctx->saved_data["eps"] = call.eps;
    ctx->saved_data["semantics"] = reinterpret_cast<int64_t>(call.semantics);
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &dy = dys[0], &x = saved[0], &weight = saved[1], &bias = saved[2],
                 &stats = saved[3];
    // Edges exist for the tensors that were given.
    const Mask mask{ctx->needs_input_grad(0), weight.defined() && ctx->needs_input_grad(1),
                    bias.defined() && ctx->needs_input_grad(weight.defined() ? 2 : 1)};
    Call call{nullptr, ctx->saved_data["normalized_ndim"].toInt(),
              ctx->saved_data["eps"].toDouble(),
              reinterpret_cast<PyObject*>(ctx->saved_data["semantics"].toInt())};
    std::array<Tensor, 3> grads;
    const bool recorded = at::GradMode::is_enabled();
    if (!recorded) {
      call.kernel = backward_kernel(call, dy, x, weight, bias, stats, mask);
      if (call.kernel != nullptr &&
          launch_backward(call, dy, x, weight, bias, stats, mask, grads)) {
        return {grads[0], grads[1], grads[2], Tensor()};
      }
    }
    with_python([&] {
      const auto semantics = py::reinterpret_borrow<py::object>(call.semantics);
      const py::tuple results = recorded
          ? python->differentiable(wrap(dy), wrap(x), wrap(weight), wrap(bias),
                                   call.normalized_ndim, call.eps, semantics, mask_of(mask))
          : python->backward(wrap(dy), wrap(x), wrap(weight), wrap(bias), wrap(stats),
                             call.normalized_ndim, semantics, mask_of(mask));
      for (size_t i = 0; i < 3; ++i) {
        const py::object grad = results[i];
        if (!grad.is_none()) grads[i] = THPVariable_Unpack(grad.ptr());
      }
    });
    return {grads[0], grads[1], grads[2], Tensor()};
  }
};

// ---- From Python --------------------------------------------------------------------------------

// A tensor of torch's own two classes, or nothing; false for anything else.
bool unpack(PyObject* object, Tensor& tensor) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}

// Strings whose address stands for what they say.
bool interned(PyObject* object) {
  return PyUnicode_CheckExact(object) && PyUnicode_CHECK_INTERNED(object);
}

// The normalised elements of a row, or 0 where shapes do not fit exactly (Python says why).
int64_t hidden_of(PyObject* shape, const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (!PyTuple_Check(shape)) return 0;
  const auto ndim = PyTuple_GET_SIZE(shape);
  if (ndim == 0 || ndim > x.dim()) return 0;
  const auto normalized = x.sizes().slice(x.dim() - ndim);
  int64_t hidden = 1;
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    PyObject* size = PyTuple_GET_ITEM(shape, i);
    if (!PyLong_CheckExact(size) || PyLong_AsLongLong(size) != normalized[i]) return 0;
    hidden *= normalized[i];
  }
  const bool fits = (!weight.defined() || weight.sizes() == normalized) &&
      (!bias.defined() || bias.sizes() == normalized);
  return fits ? hidden : 0;
}

// norm(input, shape, weight, bias, eps, semantics, autocast_output) -> Tensor, or None where Python
// is to serve the call.
PyObject* norm(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 7, "fastnorm's norm takes 7 arguments, got ", count);
  Tensor x, weight, bias;
  PyObject *shape = arguments[1], *semantics = arguments[5], *autocast_output = arguments[6];
  if (paused || !unpack(arguments[0], x) || !x.defined() || !unpack(arguments[2], weight) ||
      !unpack(arguments[3], bias) || !PyFloat_CheckExact(arguments[4]) ||
      !interned(semantics) || !interned(autocast_output) ||
      watched() || !plain(x) || !x.is_contiguous() || !beside(weight, x) || !beside(bias, x) ||
      x.numel() == 0) {
    Py_RETURN_NONE;
  }
  const int64_t hidden = hidden_of(shape, x, weight, bias);
  if (hidden == 0) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  const auto place = x.device().type();
  const bool autocast = at::autocast::is_autocast_enabled(place);
  const uint64_t facts = static_cast<uint64_t>(x.scalar_type()) | dtype_or_none(weight) << 8 |
      dtype_or_none(bias) << 16 |
      static_cast<uint64_t>(static_cast<uint8_t>(x.get_device())) << 24 |
      static_cast<uint64_t>(aligned(x) && aligned(weight) && aligned(bias)) << 32 |
      static_cast<uint64_t>(autocast) << 33 |
      (autocast ? static_cast<uint64_t>(at::autocast::get_autocast_dtype(place)) << 40 : 0);
  const Key key{static_cast<uint64_t>(hidden), reinterpret_cast<uint64_t>(semantics),
                reinterpret_cast<uint64_t>(autocast_output), facts};
  Kernel* kernel = find(FORWARD, key);
  if (kernel == nullptr && decidable(x)) {
    const auto borrow = [](PyObject* o) { return py::reinterpret_borrow<py::object>(o); };
    kernel = learn(FORWARD, key,
                   python->resolve_forward(
                       borrow(arguments[0]), borrow(shape), borrow(arguments[2]),
                       borrow(arguments[3]), borrow(semantics), borrow(autocast_output)));
    Py_INCREF(semantics);  // part of a key, and of graphs, from here on
    Py_INCREF(autocast_output);
  }
  if (kernel == nullptr || !kernel->serves) Py_RETURN_NONE;
  const Call call{kernel, PyTuple_GET_SIZE(shape), PyFloat_AS_DOUBLE(arguments[4]), semantics};
  const auto given = [](const Tensor& t) {
    return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
  };
  Tensor y;
  {
    // A launch may wait for room in the stream, and that for another thread's Python.
    const py::gil_scoped_release released;
    y = at::GradMode::is_enabled() ? NormBackward::apply(x, given(weight), given(bias), call)
                                   : run_forward(call, x, weight, bias).first;
  }
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(norm)), METH_FASTCALL,
     "norm(input, shape, weight, bias, eps, semantics, autocast_output) -> Tensor | None"},
    {nullptr, nullptr, 0, nullptr}};

void connect(const py::object& resolve_forward, const py::object& resolve_backward,
             const py::object& forward, const py::object& backward,
             const py::object& differentiable, const py::object& scratch) {
  python = new Python{resolve_forward, resolve_backward, forward,
                      backward,        differentiable,   scratch};
  paused = false;
}

void forget() {
  const std::lock_guard<std::mutex> lock(mutex);
  // Calls in flight may hold a kernel of these: they keep their address, and serve no new ones.
  static auto* retired = new std::vector<std::map<Key, Kernel>>();
  for (auto& known : kernels) {
    retired->push_back(std::move(known));
    known.clear();
  }
}

py::list counts() {
  // Python's lists come after the lock: making them may collect garbage, which runs anything.
  std::vector<std::tuple<const char*, std::string, int64_t>> found;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const int pass : {FORWARD, BACKWARD}) {
      for (const auto& [key, kernel] : kernels[pass]) {
        const int64_t calls = kernel.calls;
        if (calls > 0) found.emplace_back(pass == FORWARD ? "forward" : "backward", kernel.route, calls);
      }
    }
  }
  py::list all;
  for (const auto& [pass, route, calls] : found) all.append(py::make_tuple(pass, route, calls));
  return all;
}

void reset_counts() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& known : kernels) {
    for (auto& [key, kernel] : known) kernel.calls = 0;
  }
}

}  // namespace

PYBIND11_MODULE(fastnorm_native, m) {
  m.doc() = "fastnorm's eager calls without Python between; see fastnorm/native/shortcut.py";
  PyModule_AddFunctions(m.ptr(), methods);
  m.def("connect", &connect);
  m.def("forget", &forget);
  m.def("pause", [](bool on) { paused = on; });
  m.def("counts", &counts);
  m.def("reset_counts", &reset_counts);
}
