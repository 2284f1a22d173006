// Devices, streams and events, as PyTorch's generic interface wants them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <mutex>
#include <set>

#include "session.h"

namespace sky {
namespace {

// As many as CUDA's pools have; who makes more shares them.
constexpr uint32_t kStreams = 32;

struct Event {
  uint32_t number;
  uint32_t session;
};

// The numbers of events that are gone are given again, the lowest first: so steps that make the same events send the
// same bytes.
class Numbers {
 public:
  uint32_t take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) return next_++;
    return free_.extract(free_.begin()).value();
  }
  void give(uint32_t number) {
    std::lock_guard lock(mutex_);
    free_.insert(number);
  }

 private:
  std::mutex mutex_;
  std::set<uint32_t> free_;
  uint32_t next_ = 0;
};

Numbers& event_numbers() {
  static auto* numbers = new Numbers;  // events may end after the process's static objects
  return *numbers;
}

Session& session_of(const Event& event) {
  auto* session = session_by_serial(event.session);
  SKY_CHECK(session, "an event of no device");
  return *session;
}

template <typename T>
T value_in(const std::string& answer) {
  T value{};
  SKY_CHECK(answer.size() == sizeof value, "the worker answered with ", answer.size(), " bytes");
  std::memcpy(&value, answer.data(), sizeof value);
  return value;
}

uint32_t number_of(const c10::Stream& stream) { return static_cast<uint32_t>(stream.id()); }

c10::Device with_index(c10::Device device) { return device.has_index() ? device : c10::Device(kSky, current_device()); }

c10::Stream stream_of(c10::Device device, uint32_t number) {
  return c10::Stream(c10::Stream::UNSAFE, with_index(device), number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSky;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kSky; }

  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kSky, current_device()}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_current_device(device.index()); }
  // The autograd engine sizes its queues from this once, at the first backward: count them all.
  c10::DeviceIndex deviceCount() const noexcept override { return kDevicesMax; }
  // Every dtype but the quantized ones.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    auto& types = capability.capability_data.supported_scalar_types;
    types.has_QInt8 = types.has_QUInt8 = types.has_QInt32 = types.has_QUInt4x2 = types.has_QUInt2x4 = 0;
    return capability;
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { session_at(index).synchronize(kAllStreams); }

  c10::Stream getStream(c10::Device d) const override { return stream_of(d, current_stream(with_index(d).index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream_of(d, 0); }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    static std::atomic<uint32_t> next{0};
    auto number = 1 + next++ % kStreams;
    return stream_of(d, priority < 0 ? kUrgentStreams + number : number);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool urgent) const override {
    return getNewStream(d, urgent ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    set_current_stream(s.device_index(), number_of(s));
    return old;
  }
  bool queryStream(const c10::Stream& s) const override {
    return value_in<uint8_t>(session_at(s.device_index()).event(0, kQueryStream, number_of(s)));
  }
  void synchronizeStream(const c10::Stream& s) const override {
    session_at(s.device_index()).synchronize(number_of(s));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (!pointer) return;
    auto place = Session::behind(pointer);
    place.session->used_on(place.slot, number_of(stream));
  }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    auto& session = session_at(s.device_index());
    if (!*event) *event = std::make_unique<Event>(Event{event_numbers().take(), session.serial}).release();
    auto& ours = *static_cast<Event*>(*event);
    SKY_CHECK(ours.session == session.serial, "an event is recorded on the device it was first recorded on");
    session.event(ours.number, flag == c10::EventFlag::BACKEND_DEFAULT ? kRecordTimed : kRecord, number_of(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    auto& ours = *static_cast<Event*>(event);
    auto& theirs = session_at(s.device_index());
    if (ours.session == theirs.serial) return void(theirs.event(ours.number, kBlock, number_of(s)));
    // Another device sees of this one only what is copied to it, and a copy is sent from the current stream.
    auto& session = session_of(ours);
    session.event(ours.number, kBlock, current_stream(static_cast<c10::DeviceIndex>(session.index)));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& ours = *static_cast<Event*>(event);
    return value_in<uint8_t>(session_of(ours).event(ours.number, kQuery, 0));
  }
  void synchronizeEvent(void* event) const override {
    if (event) session_of(*static_cast<Event*>(event)).event(static_cast<Event*>(event)->number, kAwait, 0);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    SKY_CHECK(from && to, "both events must be recorded before the time between them is asked for");
    auto &a = *static_cast<Event*>(from), &b = *static_cast<Event*>(to);
    SKY_CHECK(a.session == b.session, "the time between events of two devices is not known");
    return value_in<double>(session_of(a).event(a.number, kElapsed, b.number));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    std::unique_ptr<Event> owned(static_cast<Event*>(event));
    if (!owned) return;
    try {
      session_of(*owned).event(owned->number, kForgetEvent, 0);
    } catch (...) {
      // The device is gone, and the worker's event with it.
    }
    event_numbers().give(owned->number);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace sky
