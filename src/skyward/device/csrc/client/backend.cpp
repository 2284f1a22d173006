// What PyTorch needs to know of a backend: its hooks and random number generators.
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <map>
#include <random>

#include "pinned.h"
#include "session.h"

namespace sky {
namespace {

std::string tell_generator(int index, uint32_t id, GeneratorAction action, std::string_view content, bool replied) {
  auto& session = session_at(static_cast<c10::DeviceIndex>(index));
  Writer w;
  w.u32(kGenerator);
  w.u32(static_cast<uint32_t>(4 + 1 + 4 + content.size()));
  w.u32(id);
  w.u8(action);
  w.text(content);
  auto line = line_of_tape();
  if (action != kForget) session.block_tape_elsewhere("a generator of another device");
  std::lock_guard lock(session.mutex);
  session.begin();
  if (auto* noted = session.tape(); noted && action != kForget)
    noted->blocked(replied ? "the state of a generator is read" : "a generator is given a seed or a state", line);
  if (replied) return session.ask(w.bytes().data(), w.size());
  session.put(w.bytes().data(), w.size());
  return "";
}

// The generators that live, for checkpoints: the device's index and the generator's number.
std::mutex generators_mutex;
std::multimap<int, uint32_t>& generators = *std::make_unique<std::multimap<int, uint32_t>>().release();

// The state is in the worker's generator, so numbers equal a native run on that hardware.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator(c10::DeviceIndex index, uint32_t id)
      : GeneratorImpl(c10::Device(kSky, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), id_(id) {
    std::lock_guard lock(generators_mutex);
    if (id) generators.emplace(index, id);
  }

  ~Generator() override {
    if (!id_) return;
    {
      std::lock_guard lock(generators_mutex);
      std::erase_if(generators, [&](auto& each) { return each.second == id_; });
    }
    try {
      tell(kForget, "", false);
    } catch (...) {
      // The device is gone, and the worker's generator with it.
    }
  }

  static c10::DeviceType device_type() { return kSky; }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    note_seeding();
    tell(kSeed, std::string_view(reinterpret_cast<const char*>(&seed), 8), false);
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    std::random_device random;
    set_current_seed((uint64_t{random()} << 32 | random()) & 0x1FFFFFFFFFFFFF);
    return seed_;
  }
  // Not an offset here: how the fallback learns which of the worker's generators is meant.
  void set_offset(uint64_t) override { SKY_CHECK(false, "a sky generator has no offset to set; use set_state"); }
  uint64_t get_offset() const override { return id_; }
  void set_state(const c10::TensorImpl& state) override {
    note_seeding();
    tell(kSetState, std::string_view(static_cast<const char*>(state.data()), state.numel()), true);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto content = tell(kGetState, "", true);
    auto state = at::empty({static_cast<int64_t>(content.size())}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(state.mutable_data_ptr(), content.data(), content.size());
    return state.getIntrusivePtr();
  }

 private:
  // What was drawn from the device's own generator for later use is drawn anew.
  void note_seeding() {
    if (!id_) session_at(device().index()).seedings++;
  }

  std::string tell(GeneratorAction action, std::string_view content, bool replied) const {
    return tell_generator(device().index(), id_, action, content, replied);
  }
  GeneratorImpl* clone_impl() const override {
    static std::atomic<uint32_t> next{1u << 20};
    auto copy = std::make_unique<Generator>(device().index(), next++);
    copy->set_state(*get_state());
    copy->seed_ = seed_;
    return copy.release();
  }

  uint32_t id_;
  uint64_t seed_ = c10::default_rng_seed_val;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return open_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(open_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto old = current_device();
    if (index >= 0) set_current_device(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::array<at::Generator, kDevicesMax> made;
    static std::mutex mutex;
    if (index < 0) index = current_device();
    std::lock_guard lock(mutex);
    auto& g = made.at(static_cast<size_t>(index));
    if (!g.defined()) g = at::make_generator<Generator>(index, 0);
    return g;
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    static std::atomic<uint32_t> next{1};
    auto g = at::make_generator<Generator>(index < 0 ? current_device() : index, next++);
    g.set_current_seed(c10::default_rng_seed_val);
    return g;
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    auto place = Session::behind(reinterpret_cast<uintptr_t>(data));
    return {kSky, static_cast<c10::DeviceIndex>(place.session->index)};
  }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    Session::behind(impl->_mutable_data_ptr_no_checks()).session->resize_storage(impl, bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(std::make_unique<Hooks>().release());
  return true;
}();

}  // namespace

std::vector<uint32_t> living_generators(int index) {
  std::lock_guard lock(generators_mutex);
  std::vector<uint32_t> found;
  auto [first, last] = generators.equal_range(index);
  for (auto each = first; each != last; ++each) found.push_back(each->second);
  return found;
}

std::string generator_state(int index, uint32_t id) { return tell_generator(index, id, kGetState, "", true); }

void set_generator_state(int index, uint32_t id, std::string_view state) {
  if (!id) session_at(static_cast<c10::DeviceIndex>(index)).seedings++;
  tell_generator(index, id, kSetState, state, true);
}

}  // namespace sky
