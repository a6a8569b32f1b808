// Lets a build of torch without CUDA have fake tensors on "cuda": they need a device guard, and this one does nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);

}  // namespace
