// Registers a fake CUDA device with a CPU build of torch, sufficient for FakeTensors, which hold no data.
// It has one stream, on which everything completes at once, and hooks that report one device.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device device(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, device);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device; }
  Device exchangeDevice(Device) const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return stream; }
  Stream getNewStream(Device, int = 0) const override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace c10::impl {
const DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());
}

namespace at {
using at::CUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks)
}  // namespace at
