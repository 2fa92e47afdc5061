// What the driver tells of its card, through NVML: opened by name, since it comes with the driver and is
// linked by nobody.

#include <dlfcn.h>

#include <mutex>

#include <fusedmoe/machine.hpp>

namespace fusedmoe {
namespace {

using Handle = void*;
constexpr int kSuccess = 0;
constexpr int kClockSm = 1, kClockMemory = 2, kSensorGpu = 0;  // nvmlClockType_t, nvmlTemperatureSensors_t

template <typename Function>
Function Symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

void Read(void* library, CardState& state) {
  const auto init = Symbol<int (*)()>(library, "nvmlInit_v2");
  const auto shut_down = Symbol<int (*)()>(library, "nvmlShutdown");
  // By bus address: the process may number its cards in an order of its own.
  const auto find = Symbol<int (*)(const char*, Handle*)>(library, "nvmlDeviceGetHandleByPciBusId_v2");
  if (init == nullptr || shut_down == nullptr || find == nullptr || init() != kSuccess) {
    return;
  }
  Handle card = nullptr;
  if (find(HostMachine().cuda->bus_address.c_str(), &card) == kSuccess) {
    const auto clock = Symbol<int (*)(Handle, int, unsigned*)>(library, "nvmlDeviceGetClockInfo");
    const auto max_clock = Symbol<int (*)(Handle, int, unsigned*)>(library, "nvmlDeviceGetMaxClockInfo");
    const auto power = Symbol<int (*)(Handle, unsigned*)>(library, "nvmlDeviceGetPowerUsage");
    const auto limit = Symbol<int (*)(Handle, unsigned*)>(library, "nvmlDeviceGetEnforcedPowerLimit");
    const auto heat = Symbol<int (*)(Handle, int, unsigned*)>(library, "nvmlDeviceGetTemperature");
    const auto version = Symbol<int (*)(char*, unsigned)>(library, "nvmlSystemGetDriverVersion");
    unsigned value = 0;
    if (clock != nullptr && clock(card, kClockSm, &value) == kSuccess) {
      state.sm_mhz = static_cast<int>(value);
    }
    if (clock != nullptr && clock(card, kClockMemory, &value) == kSuccess) {
      state.memory_mhz = static_cast<int>(value);
    }
    if (max_clock != nullptr && max_clock(card, kClockSm, &value) == kSuccess) {
      state.max_sm_mhz = static_cast<int>(value);
    }
    if (power != nullptr && power(card, &value) == kSuccess) {
      state.power_watts = value / 1000.0;
    }
    if (limit != nullptr && limit(card, &value) == kSuccess) {
      state.power_limit_watts = value / 1000.0;
    }
    if (heat != nullptr && heat(card, kSensorGpu, &value) == kSuccess) {
      state.temperature_celsius = static_cast<int>(value);
    }
    char text[96] = {};
    if (version != nullptr && version(text, sizeof(text)) == kSuccess) {
      text[sizeof(text) - 1] = 0;
      state.driver = text;
    }
  }
  (void)shut_down();
}

}  // namespace

CardState ReadCardState() {
  CardState state;
  if (!HostMachine().cuda) {
    return state;
  }
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  void* library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library != nullptr) {
    Read(library, state);
    dlclose(library);
  }
  return state;
}

}  // namespace fusedmoe
