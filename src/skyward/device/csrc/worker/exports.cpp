#include "exports.h"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "../wire/records.h"

namespace sky {
namespace {

constexpr size_t kName = 32;
constexpr size_t kUuid = 16;
constexpr size_t kHandle = 64;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// A file without a name in any folder: others open it as /proc/PID/fd/NUMBER, and know it by its random name.
class SharedFile {
 public:
  SharedFile() : name_(random_name()) {
    descriptor_ = ::memfd_create(name_.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor_ < 0) fail("memfd_create");
  }
  ~SharedFile() { ::close(descriptor_); }
  SharedFile(const SharedFile&) = delete;

  void reserve(size_t size) {
    if (::ftruncate(descriptor_, static_cast<off_t>(size))) fail("reserving shared memory");
    seal();
  }

  void fill(const char* from, size_t size) {
    // Written, not copied to a mapping: that spares the zeroing of fresh pages.
    for (size_t done = 0; done < size;) {
      auto n = ::pwrite(descriptor_, from + done, std::min<size_t>(size - done, 64 << 20), static_cast<off_t>(done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail("writing shared memory");
      done += static_cast<size_t>(n);
    }
    seal();
  }

  // Those who use what the file stands for hold it locked, and let go even when they are killed.
  bool is_locked_elsewhere() const { return ::flock(descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; }

  int descriptor() const { return descriptor_; }
  const std::string& name() const { return name_; }

 private:
  // Whoever maps it must never meet a missing page.
  void seal() { ::fcntl(descriptor_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW); }

  static std::string random_name() {
    std::random_device random;
    std::string name;
    while (name.size() < kName) name += "0123456789abcdef"[random() & 15];
    return name;
  }

  std::string name_;
  int descriptor_ = -1;
};

using Moment = std::chrono::steady_clock::time_point;

// What stands behind an exported storage's pointer from then on.
struct Exported {
  SharedFile file;
  void* mapped = nullptr;  // a CPU's
  size_t size = 0;
  bool is_new = false;  // nothing has been copied to it
  Moment idle_since;
  c10::DataPtr original;  // a GPU's
  std::string gpu;        // how to open that
  bool described = false;

  ~Exported() {
    if (mapped) ::munmap(mapped, size);
  }
  bool is_borrowed() const { return original && file.is_locked_elsewhere(); }
};

// Smaller memory comes from the heap, where it is used again without page faults.
constexpr size_t kShareableLeast = 1 << 20;
// Memory that nobody else has opened is used again: a new page costs eight times as much as writing it (1.8 against 15
// GB/s). So much of it is kept, but no more than this share of the machine's memory, and for so long.
constexpr size_t kIdleMost = 1 << 30;
constexpr size_t kIdleShare = 8;
constexpr auto kIdleTime = std::chrono::seconds(10);

size_t idle_most() {
  static const size_t most =
      std::min(kIdleMost, static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE) / kIdleShare);
  return most;
}

// The threads of links free memory as well as the session's own.
std::mutex& lists() {
  static std::mutex mutex;
  return mutex;
}

using Idle = std::vector<std::unique_ptr<Exported>>;

// The oldest first.
Idle& idle() {
  static Idle waiting;
  return waiting;
}

std::atomic<size_t> idle_total = 0;

// Unmapping takes a while: what is returned is to be freed without the lock.
Idle take_oldest(size_t count) {
  auto& waiting = idle();
  Idle taken;
  for (size_t i = 0; i < count; i++) {
    idle_total -= waiting[i]->size;
    taken.push_back(std::move(waiting[i]));
  }
  waiting.erase(waiting.begin(), waiting.begin() + static_cast<ptrdiff_t>(count));
  return taken;
}

Idle keep_idle(std::unique_ptr<Exported>& gone) {
  auto most = idle_most();
  if (!gone->mapped || gone->described || gone->size > most) return {};
  size_t count = 0;
  for (size_t total = idle_total + gone->size; total > most; count++) total -= idle()[count]->size;
  auto surplus = take_oldest(count);
  gone->idle_since = std::chrono::steady_clock::now();
  idle_total += gone->size;
  idle().push_back(std::move(gone));
  return surplus;
}

std::unique_ptr<Exported> take_idle(size_t size) {
  std::lock_guard lock(lists());
  auto& waiting = idle();
  // The newest: what is more than enough gets old, and goes.
  auto found = std::find_if(waiting.rbegin(), waiting.rend(), [&](auto& each) { return each->size == size; });
  if (found == waiting.rend()) return nullptr;
  auto taken = std::move(*found);
  waiting.erase(std::next(found).base());
  idle_total -= size;
  return taken;
}

std::vector<std::unique_ptr<Exported>>& freed_too_early() {
  static std::vector<std::unique_ptr<Exported>> waiting;
  return waiting;
}

void drop(void* context) noexcept {
  std::unique_ptr<Exported> gone(static_cast<Exported*>(context));
  Idle surplus;
  std::lock_guard lock(lists());
  surplus = keep_idle(gone);
  if (!gone) return;
  // A mapping of the file keeps its memory; that of a GPU would go to another tensor.
  if (gone->is_borrowed()) freed_too_early().push_back(std::move(gone));
}

Exported* find(const c10::Storage& storage) { return storage.data_ptr().cast_context<Exported>(&drop); }

Exported* replace_pointer(const c10::Storage& storage, void* data, std::unique_ptr<Exported> by) {
  auto* context = by.release();
  auto before = storage.set_data_ptr(c10::DataPtr(data, context, &drop, storage.device()));
  if (!context->mapped) context->original = std::move(before);
  return context;
}

Exported* export_host(const c10::Storage& storage) {
  auto made = std::make_unique<Exported>();
  made->size = storage.nbytes();
  made->file.fill(static_cast<const char*>(storage.data()), made->size);
  auto* mapped =
      ::mmap(nullptr, made->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, made->file.descriptor(), 0);
  if (mapped == MAP_FAILED) fail("mapping shared memory");
  made->mapped = mapped;
  return replace_pointer(storage, mapped, std::move(made));
}

// There are no CUDA headers to build with, but where there is a GPU its driver is in this process.
template <typename F>
F driver(const char* name) {
  static auto* library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  auto found = library ? ::dlsym(library, name) : nullptr;
  if (!found) throw std::runtime_error("the CUDA driver is not there");
  return reinterpret_cast<F>(found);
}

void check(int code) {
  if (code) throw std::runtime_error("CUDA error " + std::to_string(code));
}

// u8[16] which GPU, u8[64] handle of the allocation, u64 where in it.
std::string describe_gpu(const c10::Storage& storage) {
  int device;
  char uuid[kUuid], handle[kHandle] = {};
  check(driver<int (*)(int*)>("cuCtxGetDevice")(&device));
  check(driver<int (*)(void*, int)>("cuDeviceGetUuid_v2")(uuid, device));
  uint64_t base = 0, address = reinterpret_cast<uint64_t>(storage.data());
  if (address) {
    size_t size;
    check(driver<int (*)(uint64_t*, size_t*, uint64_t)>("cuMemGetAddressRange_v2")(&base, &size, address));
    check(driver<int (*)(void*, uint64_t)>("cuIpcGetMemHandle")(handle, base));
  }
  Writer w;
  w.raw(uuid, sizeof uuid);
  w.raw(handle, sizeof handle);
  w.u64(address - base);
  return w.bytes();
}

Exported* export_gpu(const c10::Storage& storage) {
  auto made = std::make_unique<Exported>();
  made->gpu = describe_gpu(storage);
  auto* data = storage.mutable_data();
  return replace_pointer(storage, data, std::move(made));
}

// u32 process, u32 descriptor, u8[32] name, u64 bytes; then where it is on a GPU. Read by objects/references.py.
std::string describe(const Exported* exported, uint64_t bytes, const std::string& gpu) {
  Writer w;
  w.u32(static_cast<uint32_t>(::getpid()));
  w.u32(exported ? static_cast<uint32_t>(exported->file.descriptor()) : 0);
  w.raw((exported ? exported->file.name() : std::string(kName, '0')).data(), kName);
  w.u64(bytes);
  w.raw(gpu.data(), gpu.size());
  return w.bytes();
}

}  // namespace

std::string exported(const c10::Storage& storage) {
  auto type = storage.device_type();
  if (type != c10::kCPU && type != c10::kCUDA) return "";
  try {
    if (!storage.nbytes()) return describe(nullptr, 0, type == c10::kCUDA ? describe_gpu(storage) : "");
    auto* found = find(storage);
    if (!found) found = type == c10::kCPU ? export_host(storage) : export_gpu(storage);
    found->described = true;
    return describe(found, storage.nbytes(), found->gpu);
  } catch (const std::exception&) {
    // A machine that cannot share this memory: the client sends the bytes instead.
    return "";
  }
}

c10::Storage shareable(uint64_t bytes) {
  if (bytes < kShareableLeast) return {};
  try {
    auto made = take_idle(bytes);
    if (!made) {
      made = std::make_unique<Exported>();
      made->size = bytes;
      made->is_new = true;
      made->file.reserve(bytes);
      auto* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->file.descriptor(), 0);
      if (mapped == MAP_FAILED) fail("mapping shared memory");
      made->mapped = mapped;
    }
    auto* data = made->mapped;
    c10::DataPtr pointer(data, made.release(), &drop, c10::Device(c10::kCPU));
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(pointer), c10::GetCPUAllocator(), true);
  } catch (const std::exception&) {
    return {};
  }
}

bool begin_to_fill(const c10::Storage& storage) {
  auto* found = find(storage);
  return found && std::exchange(found->is_new, false);
}

size_t idle_bytes() { return idle_total; }

void free_idle(bool all) {
  if (!idle_total) return;
  Idle old;
  std::lock_guard lock(lists());
  auto& waiting = idle();
  auto until = std::chrono::steady_clock::now() - kIdleTime;
  auto kept =
      std::find_if(waiting.begin(), waiting.end(), [&](auto& each) { return !all && each->idle_since > until; });
  old = take_oldest(static_cast<size_t>(kept - waiting.begin()));
}

const c10::DataPtr& allocated(const c10::Storage& storage) {
  auto* found = find(storage);
  return found && found->original ? found->original : storage.data_ptr();
}

void collect_exports() {
  std::lock_guard lock(lists());
  std::erase_if(freed_too_early(), [](auto& waiting) { return !waiting->is_borrowed(); });
}

}  // namespace sky
