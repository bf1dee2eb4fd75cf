// What PyTorch asks of CUDA before it comes to a kernel: a device, a stream, a context and random generators. A build
// for the CPU has none of them, and without them slicing and backward fail on tensors that claim to be on CUDA.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

const c10::Device GPU(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Draws like a generator of the CPU, but its state has another size, so that neither takes the state of the other.
struct FakeGenerator : at::CPUGeneratorImpl {
  static constexpr int64_t MORE = 16;

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::Tensor::wrap_tensor_impl(at::CPUGeneratorImpl::get_state());
    return at::cat({state, at::zeros({MORE}, at::kByte)}).getIntrusivePtr();
  }

  void set_state(const c10::TensorImpl& state) override {
    auto size = at::Tensor::wrap_tensor_impl(at::CPUGeneratorImpl::get_state()).numel();
    TORCH_CHECK(state.numel() == size + MORE, "RNG state is wrong size");
    auto copy = at::empty({size}, at::kByte);
    std::memcpy(copy.mutable_data_ptr(), state.data(), size);
    at::CPUGeneratorImpl::set_state(*copy.unsafeGetTensorImpl());
  }

  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    auto state = static_cast<at::CPUGeneratorImpl&>(*other).at::CPUGeneratorImpl::get_state();
    at::CPUGeneratorImpl::set_state(*state);
  }
};

}  // namespace

namespace at {

struct FakeCUDAHooks : CUDAHooksInterface {
  explicit FakeCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<FakeGenerator>(); }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCUDAHooks)

}  // namespace at
