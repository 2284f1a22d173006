#include "exports.h"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

// What stands behind an exported storage's pointer from then on.
struct Exported {
  SharedFile file;
  void* mapped = nullptr;  // a CPU's
  size_t size = 0;
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
// Memory that nobody else has opened is used again: fresh pages cost as much as writing them.
constexpr size_t kIdleMost = 64 << 20;

// The threads of links free memory as well as the session's own.
std::mutex& lists() {
  static std::mutex mutex;
  return mutex;
}

std::vector<std::unique_ptr<Exported>>& idle() {
  static std::vector<std::unique_ptr<Exported>> waiting;
  return waiting;
}

bool keep_idle(std::unique_ptr<Exported>& gone) {
  if (!gone->mapped || gone->described || gone->size > kIdleMost) return false;
  auto& waiting = idle();
  waiting.push_back(std::move(gone));
  size_t total = 0;
  for (auto& each : waiting) total += each->size;
  while (total > kIdleMost) {
    total -= waiting.front()->size;
    waiting.erase(waiting.begin());
  }
  return true;
}

std::unique_ptr<Exported> take_idle(size_t size) {
  std::lock_guard lock(lists());
  auto& waiting = idle();
  auto found = std::find_if(waiting.begin(), waiting.end(), [&](auto& each) { return each->size == size; });
  if (found == waiting.end()) return nullptr;
  auto taken = std::move(*found);
  waiting.erase(found);
  return taken;
}

std::vector<std::unique_ptr<Exported>>& freed_too_early() {
  static std::vector<std::unique_ptr<Exported>> waiting;
  return waiting;
}

void drop(void* context) noexcept {
  std::unique_ptr<Exported> gone(static_cast<Exported*>(context));
  std::lock_guard lock(lists());
  if (keep_idle(gone)) return;
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

const c10::DataPtr& allocated(const c10::Storage& storage) {
  auto* found = find(storage);
  return found && found->original ? found->original : storage.data_ptr();
}

void collect_exports() {
  std::lock_guard lock(lists());
  std::erase_if(freed_too_early(), [](auto& waiting) { return !waiting->is_borrowed(); });
}

}  // namespace sky
