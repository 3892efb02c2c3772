// Registers fake CUDA devices with a CPU build of torch, sufficient for FakeTensors, which hold no data.
// Everything completes at once. Each thread has a current device, and a current stream on each device, as in CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr int num_devices = 4;
thread_local int current_device = 0;  // 0 in a new thread
thread_local int64_t current_stream[num_devices] = {};
std::atomic<int64_t> last_stream{0};
std::mutex mutex;
std::vector<int64_t> set_devices;  // thread and device of each call that would create a CUDA context

Device device_of(int index) {
  return Device(DeviceType::CUDA, static_cast<DeviceIndex>(index));
}

Stream stream_of(int device, int64_t id) {
  return Stream(Stream::UNSAFE, device_of(device), id);
}

// As cudaSetDevice since CUDA 12: creates the device's context, unless the device is the current one.
int set_device(int index) {
  int old = current_device;
  if (index >= 0 && index != old) {
    std::lock_guard<std::mutex> lock(mutex);
    set_devices.push_back(syscall(SYS_gettid));
    set_devices.push_back(index);
    current_device = index;
  }
  return old;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Device getDevice() const override { return device_of(current_device); }
  Device exchangeDevice(Device device) const override { return device_of(set_device(device.index())); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const noexcept override {
    int index = device.index() < 0 ? current_device : device.index();
    return stream_of(index, current_stream[index]);
  }
  Stream getNewStream(Device device, int = 0) const override { return stream_of(device.index(), ++last_stream); }
  Stream exchangeStream(Stream stream) const noexcept override {
    int index = stream.device_index();
    int64_t old = current_stream[index];
    current_stream[index] = stream.id();
    return stream_of(index, old);
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
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
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
};

}  // namespace

namespace c10::impl {
const DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());
}

namespace at {
using at::CUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", ::Hooks)
}  // namespace at

extern "C" {
int fake_cuda_device() { return current_device; }
int fake_cuda_set_device(int index) { return set_device(index); }
int fake_cuda_exchange_without_context(int index) {
  int old = current_device;
  current_device = index < 0 ? old : index;
  return old;
}
int64_t fake_cuda_stream(int device) { return current_stream[device]; }
int64_t fake_cuda_new_stream() { return ++last_stream; }
void fake_cuda_set_stream(int64_t stream, int device) { current_stream[device] = stream; }
// Copies thread and device of each call that would create a context, and returns the number of values.
int fake_cuda_set_devices(int64_t* values, int size) {
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < size && i < static_cast<int>(set_devices.size()); i++) values[i] = set_devices[i];
  return static_cast<int>(set_devices.size());
}
}
