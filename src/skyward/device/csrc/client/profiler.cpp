// What PyTorch's own profilers want of a device.
//
// The profiler with events (`torch.autograd.profiler.profile(use_device="sky")`) records an event of ours before
// and after each operation. The one with traces (`torch.profiler`) takes activities from Kineto, which gets them
// from our recordings: when the worker ran each operation.
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "session.h"

// Not every build of PyTorch brings it.
#if __has_include(<kineto/libkineto.h>)
#define SKY_HAS_KINETO
#define KINETO_NAMESPACE libkineto
#include <kineto/libkineto.h>
#include <kineto/output_base.h>
#endif

namespace sky {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

struct Stubs final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    auto index = current_device();
    auto made = std::make_shared<c10::Event>(kSky, c10::EventFlag::BACKEND_DEFAULT);
    made->record(c10::Stream(c10::Stream::UNSAFE, {kSky, index}, current_stream(index)));
    if (device) *device = index;
    if (cpu_ns) *cpu_ns = static_cast<int64_t>(nanoseconds());
    *event = std::move(made);
  }
  // In microseconds.
  float elapsed(const ProfilerVoidEventStub* from, const ProfilerVoidEventStub* to) const override {
    auto *first = static_cast<c10::Event*>(from->get()), *second = static_cast<c10::Event*>(to->get());
    return static_cast<float>(first->elapsedTime(*second) * 1000);
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return open_count() > 0; }
  void onEachDevice(std::function<void(int)> op) const override {
    for (auto index : open_indices()) op(index);
  }
  void synchronize() const override {
    for (auto index : open_indices()) session_at(static_cast<c10::DeviceIndex>(index)).synchronize(kAllStreams);
  }
};

const bool registered = [] {
  static Stubs stubs;
  torch::profiler::impl::registerPrivateUse1Methods(&stubs);
  return true;
}();

#ifdef SKY_HAS_KINETO

using libkineto::ActivityType;

// One use of the profiler: a recording of every device that is open when it starts.
class Tracing final : public libkineto::IActivityProfilerSession {
 public:
  ~Tracing() override {
    if (!stopped_) stop();
  }

  void start() override {
    stopped_ = false;
    for (auto index : open_indices()) {
      attempt([&] {
        auto& session = session_at(static_cast<c10::DeviceIndex>(index));
        session.start_recording();
        serials_.push_back(session.serial);
      });
    }
    status_ = libkineto::TraceStatus::RECORDING;
  }

  void stop() override {
    stopped_ = true;
    for (auto serial : serials_) attempt([&] { profiles_.push_back(session_by_serial(serial)->stop_recording()); });
    serials_.clear();
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  std::vector<std::string> errors() override { return problems_; }

  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }

  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t,
                    int64_t) override {
    using namespace std::chrono;
    auto epoch = duration_cast<std::chrono::nanoseconds>(system_clock::now().time_since_epoch()).count() -
                 static_cast<int64_t>(nanoseconds());
    for (auto& profile : profiles_) {
      for (size_t i = 0; i < profile.operations.size(); i++) {
        auto& times = profile.operations[i];
        bool on_gpu = times.kernel_end > 0;
        auto start = on_gpu ? times.kernel_start : times.run_start, end = on_gpu ? times.kernel_end : times.run_end;
        if (!start) continue;
        buffer_->emplace_activity(buffer_->span, ActivityType::CONCURRENT_KERNEL, profile.names[times.name]);
        auto& activity = *buffer_->activities.back();
        activity.startTime = static_cast<int64_t>(start) + epoch;
        activity.endTime = static_cast<int64_t>(end) + epoch;
        activity.device = profile.index;
        activity.resource = static_cast<int32_t>(times.stream);
        activity.id = static_cast<int32_t>(profile.correlations[i]);
        activity.linked = linked(activity.id);
        activity.flow.id = static_cast<uint32_t>(activity.id);
        activity.flow.type = libkineto::kLinkAsyncCpuGpu;
        logger.handleGenericActivity(activity);
      }
    }
    profiles_.clear();
  }

  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

  void pushCorrelationId(uint64_t id) override { outer().push_back(std::exchange(correlation, id)); }
  void popCorrelationId() override {
    if (outer().empty()) return;
    correlation = outer().back();
    outer().pop_back();
  }

 private:
  static std::vector<uint64_t>& outer() {
    thread_local std::vector<uint64_t> ids;
    return ids;
  }

  // Kineto catches nothing: what goes wrong is said in the trace.
  template <typename F>
  void attempt(F&& f) {
    try {
      f();
    } catch (const std::exception& e) {
      problems_.push_back(e.what());
    }
  }

  std::vector<uint32_t> serials_;
  std::vector<Profile> profiles_;
  std::vector<std::string> problems_;
  bool stopped_ = true;
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
};

class Tracer final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return kinds_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<ActivityType>& wanted,
                                                                 const libkineto::Config&) override {
    if (!wanted.count(ActivityType::CONCURRENT_KERNEL) || !wanted.count(ActivityType::PRIVATEUSE1_RUNTIME))
      return nullptr;
    return std::make_unique<Tracing>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(int64_t, int64_t, const std::set<ActivityType>& wanted,
                                                                 const libkineto::Config& config) override {
    return configure(wanted, config);
  }

 private:
  std::string name_ = "sky";
  std::set<ActivityType> kinds_{ActivityType::CONCURRENT_KERNEL};
};

const bool has_tracer = [] {
  libkineto::api().registerProfilerFactory([] { return std::make_unique<Tracer>(); });
  return true;
}();

#endif

}  // namespace
}  // namespace sky
