// The C interface that Python drives through ctypes; every function returns 0, or 1 with a message, or 2 where Ctrl-C
// has ended it.
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>

#include <set>
#include <sstream>

#include "links.h"
#include "operations.h"
#include "programs.h"
#include "settings.h"

namespace sky {
int register_widely(const std::set<std::string>& left);
void probe(uint64_t seed, int index, uint32_t count, std::string& definition, std::string& payload, std::string& text);

std::vector<uint32_t> living_generators(int index);
std::string generator_state(int index, uint32_t id);
void set_generator_state(int index, uint32_t id, std::string_view state);

namespace {
thread_local std::string last_message;
thread_local std::string last_export;

template <typename F>
int guarded(F&& f) {
  try {
    f();
    return 0;
  } catch (const Interrupted&) {
    return 2;
  } catch (const c10::Error& e) {
    last_message = e.what_without_backtrace();
  } catch (const std::exception& e) {
    last_message = e.what();
  }
  return 1;
}
}  // namespace
}  // namespace sky

extern "C" {

const char* sky_message() { return sky::last_message.c_str(); }

// `left` names operations, separated by spaces, whose composite kernels are right as they are.
int sky_register(const char* left, int* count) {
  return sky::guarded([&] {
    std::istringstream words(left);
    std::set<std::string> names{std::istream_iterator<std::string>(words), {}};
    *count = sky::register_widely(names);
  });
}

// Of the library of links, once, before a device that is reached over a network.
void sky_use_links(const sky_link_functions* functions) { sky::link_functions = functions; }

int sky_open(int index, const uint64_t* ways, int count, int shares_memory, int on_cpu) {
  return sky::guarded([&] {
    sky::open_session(index, sky::ways_of(ways, count, shares_memory != 0), shares_memory != 0, on_cpu != 0);
  });
}

// The device's process is the first of the ranks of a mesh, which `tree` tells how to reach each other.
int sky_join_mesh(int index, const char* tree) {
  return sky::guarded([&] { sky::session_at(static_cast<c10::DeviceIndex>(index)).join_mesh(tree); });
}

// Process groups of the mesh's ranks, which are made anew.
int sky_make_groups(int index, const char* groups) {
  return sky::guarded([&] { sky::session_at(static_cast<c10::DeviceIndex>(index)).make_groups(groups); });
}

int sky_close(int index, const char* why) {
  return sky::guarded([&] { sky::close_session(index, why); });
}

int sky_stats(int index, uint64_t* out) {
  return sky::guarded([&] {
    auto& session = sky::session_at(static_cast<c10::DeviceIndex>(index));
    session.check_open();
    auto& s = session.stats;
    uint64_t values[] = {s.operations, s.hits,    s.asks,    s.bytes,      s.waits,
                         s.uploaded,   s.fetched, s.sent_on, s.taken_over, s.coded};
    std::memcpy(out, values, sizeof values);
  });
}

// What the worker has last said of a loop, without asking it.
int sky_captured(int index, char* text, uint64_t size) {
  return sky::guarded(
      [&] { snprintf(text, size, "%s", sky::session_at(static_cast<c10::DeviceIndex>(index)).captured().c_str()); });
}

int sky_seed(int index, uint64_t seed) {
  return sky::guarded([&] {
    auto g = at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(index));
    std::lock_guard<std::mutex> lock(g.mutex());
    g.set_current_seed(seed);
  });
}

// With `data` null, the state's size only.
int sky_get_state(int index, char* data, uint64_t* size) {
  return sky::guarded([&] {
    auto g = at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(index));
    auto state = g.get_state();
    if (data && *size == state.nbytes()) std::memcpy(data, state.const_data_ptr(), state.nbytes());
    *size = state.nbytes();
  });
}

int sky_set_state(int index, const char* data, uint64_t size) {
  return sky::guarded([&] {
    auto g = at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(index));
    auto state = at::empty({static_cast<int64_t>(size)}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(state.mutable_data_ptr(), data, size);
    g.set_state(state);
  });
}

// The Python class for errors of this core; it must live as long as the process.
void sky_error_class(void* type) { sky::error_class = static_cast<_object*>(type); }

// `slice` is the StorageImpl of a slice of any storage.
void sky_learn_slices(const void* slice) {
  sky::slice_deleter = static_cast<const c10::StorageImpl*>(slice)->data_ptr().get_deleter();
}

// Describes how the process of one device reaches that of another, as JSON; returns 1 with a reason if it cannot.
void sky_introduce(int (*introduce)(int from, int to, uint64_t link, char* text, uint64_t size)) {
  sky::introduce = introduce;
}

// Names the modules that register an operation, a line each; returns 1 with a reason if it cannot.
void sky_modules_of(int (*modules_of)(const char* name, char* text, uint64_t size)) { sky::modules_of = modules_of; }

void sky_interpreter(int (*is_running)(), int (*holds_lock)(), void* (*leave)(), void (*enter)(void*)) {
  sky::interpreter = {is_running, holds_lock, leave, enter};
}

// Python's functions, and the objects to call one with: `handler_of(*arguments)` is `raises` where Ctrl-C raises
// `type`. They must live as long as the process.
void sky_interrupts(int (*lock)(), void (*unlock)(int), int (*occurred)(), _object* (*call)(_object*, _object*),
                    void (*release)(_object*), _object* handler_of, _object* arguments, _object* raises, _object* type,
                    pthread_t main_thread) {
  sky::interrupt_class = type;
  sky::interrupts = {lock, unlock, occurred, call, release, handler_of, arguments, raises, main_thread};
}

int sky_in_bad_fork() { return sky::in_bad_fork(); }

// How others on their node open these storages of one device, each named by its data pointer. With `numbered`, before
// each comes the number of its memory, which may be kept when the client leaves. The answer stays until this thread's
// next call.
int sky_export(const uint64_t* storages, uint64_t count, int numbered, const char** answer, uint64_t* size) {
  return sky::guarded([&] {
    sky::Session* session = nullptr;
    std::vector<uint32_t> slots;
    for (uint64_t i = 0; i < count; i++) {
      auto place = sky::Session::behind(static_cast<uintptr_t>(storages[i]));
      SKY_CHECK(!session || place.session == session, "a storage that is not of this device");
      session = place.session;
      // A slice that begins in the middle is no storage of the worker, which answers for slot 0 that it has none.
      slots.push_back(place.offset ? 0 : place.slot);
    }
    SKY_CHECK(session, "no storage to export");
    sky::last_export = numbered ? session->numbered(slots) : session->exported(slots);
    *answer = sky::last_export.data();
    *size = sky::last_export.size();
  });
}

// Storages over memory that was kept in the worker's process, by its numbers: weak pointers, alive until this
// thread's next call. With a count of 0, those of the last call are let go.
int sky_adopt(int index, const uint64_t* numbers, const uint64_t* sizes, uint64_t count, void** weak) {
  static thread_local std::vector<c10::Storage> made;
  return sky::guarded([&] {
    made.clear();
    if (!count) return;
    auto& session = sky::session_at(static_cast<c10::DeviceIndex>(index));
    made = session.adopt({numbers, numbers + count}, {sizes, sizes + count});
    for (uint64_t i = 0; i < count; i++) weak[i] = c10::raw::intrusive_ptr::make_weak(made[i].unsafeGetStorageImpl());
  });
}

// For checkpoints. A serial names a device's tensors, also after its worker is gone and when another has taken over.
int sky_serial(int index, uint32_t* serial) {
  return sky::guarded([&] { *serial = sky::session_at(static_cast<c10::DeviceIndex>(index)).serial; });
}

// Slot, birth and bytes of every storage that lives. The answer stays until this thread's next call.
int sky_living(uint32_t serial, const uint64_t** answer, uint64_t* count) {
  static thread_local std::vector<sky::Life> found;
  static_assert(sizeof(sky::Life) == 3 * sizeof(uint64_t));
  return sky::guarded([&] {
    auto* session = sky::session_by_serial(serial);
    SKY_CHECK(session, "no device of this process had the number ", serial);
    found = session->living();
    *answer = reinterpret_cast<const uint64_t*>(found.data());
    *count = found.size();
  });
}

// The device and the slot of a storage, named by its data pointer.
int sky_slot(uint64_t address, uint32_t* serial, uint32_t* slot) {
  return sky::guarded([&] {
    auto place = sky::Session::behind(static_cast<uintptr_t>(address));
    *serial = place.session->serial;
    *slot = place.slot;
  });
}

// A second storage over the memory of a slot, as a weak pointer, and alive until this thread's next call.
int sky_alias(uint32_t serial, uint32_t slot, void** weak) {
  static thread_local c10::Storage made;
  return sky::guarded([&] {
    made = c10::Storage();
    if (!slot) return;
    auto* session = sky::session_by_serial(serial);
    SKY_CHECK(session, "no device of this process had the number ", serial);
    made = session->alias(slot);
    *weak = c10::raw::intrusive_ptr::make_weak(made.unsafeGetStorageImpl());
  });
}

// New memory for a slot whose contents are not to be had.
int sky_renew(uint32_t serial, uint32_t slot) {
  return sky::guarded([&] {
    auto* session = sky::session_by_serial(serial);
    SKY_CHECK(session, "no device of this process had the number ", serial);
    session->renew(slot);
  });
}

// `kept` has slot, birth and bytes of the storages that get memory again. The others are lost: `slots` and `texts`
// have what to say of them, `otherwise` what to say of those that are not there.
int sky_reopen(uint32_t serial, const uint64_t* ways, int count, int shares_memory, int on_cpu, const uint64_t* kept,
               uint64_t kept_count, const uint32_t* slots, const char* const* texts, uint64_t lost_count,
               const char* otherwise) {
  return sky::guarded([&] {
    sky::Inheritance inheritance;
    auto* lives = reinterpret_cast<const sky::Life*>(kept);
    for (uint64_t i = 0; i < kept_count; i++) inheritance.kept[static_cast<uint32_t>(lives[i].slot)] = lives[i];
    for (uint64_t i = 0; i < lost_count; i++) inheritance.lost[slots[i]] = texts[i];
    inheritance.otherwise = otherwise;
    sky::reopen_session(serial, sky::ways_of(ways, count, shares_memory != 0), shares_memory != 0, on_cpu != 0,
                        inheritance);
  });
}

// The numbers of the generators of a device, besides its own, which is 0.
int sky_generators(int index, const uint32_t** ids, uint64_t* count) {
  static thread_local std::vector<uint32_t> found;
  return sky::guarded([&] {
    found = sky::living_generators(index);
    *ids = found.data();
    *count = found.size();
  });
}

// The answer stays until this thread's next call.
int sky_generator_state(int index, uint32_t id, const char** state, uint64_t* size) {
  static thread_local std::string found;
  return sky::guarded([&] {
    found = sky::generator_state(index, id);
    *state = found.data();
    *size = found.size();
  });
}

int sky_set_generator_state(int index, uint32_t id, const char* state, uint64_t size) {
  return sky::guarded([&] { sky::set_generator_state(index, id, {state, size}); });
}

// `serial` names the session even when it is closed and its index taken again.
int sky_profile_start(int index, uint32_t* serial) {
  return sky::guarded([&] {
    auto& session = sky::session_at(static_cast<c10::DeviceIndex>(index));
    session.start_recording();
    *serial = session.serial;
  });
}

// The answer (Profile::written) stays until this thread's next call.
int sky_profile_stop(uint32_t serial, const char** answer, uint64_t* size) {
  static thread_local std::string written;
  return sky::guarded([&] {
    written = sky::session_by_serial(serial)->stop_recording().written();
    *answer = written.data();
    *size = written.size();
  });
}

// What PyTorch keeps for the whole process and operations depend on.
uint64_t sky_settings_now() { return sky::settings_now(); }

// Numbers the line of the user's program that runs now; for tapes.
void sky_line_now(int (*line_now)()) { sky::line_now = line_now; }

// Notes what this thread issues on a device, until it is stopped.
int sky_start_tape(int index) {
  return sky::guarded([&] { sky::session_at(static_cast<c10::DeviceIndex>(index)).start_tape(); });
}

// What was noted, until this thread's next call.
int sky_stop_tape(uint32_t serial, const char** answer, uint64_t* size) {
  static thread_local std::string noted;
  return sky::guarded([&] {
    noted = sky::session_by_serial(serial)->stop_tape();
    *answer = noted.data();
    *size = noted.size();
  });
}

// Slots for what a program makes. They are the program's from `sky_add_program` on.
int sky_reserve(int index, uint32_t count, uint32_t* slots) {
  return sky::guarded([&] {
    auto reserved = sky::session_at(static_cast<c10::DeviceIndex>(index)).reserve(count);
    std::copy(reserved.begin(), reserved.end(), slots);
  });
}

int sky_add_program(int index, const char* content, uint64_t size, int64_t* number) {
  return sky::guarded(
      [&] { *number = sky::add_program(sky::session_at(static_cast<c10::DeviceIndex>(index)), {content, size}); });
}

void sky_drop_program(int64_t number) { sky::drop_program(number); }

int sky_finds_unchanged(int64_t number) { return sky::finds_unchanged(number); }

// For tests: random arguments as they are written, and what they are. The answers stay until the next call.
int sky_probe(int index, uint64_t seed, uint32_t count, const char** definition, uint64_t* definition_size,
              const char** payload, uint64_t* payload_size, const char** text) {
  static thread_local std::string written, sent, meant;
  return sky::guarded([&] {
    sky::probe(seed, index, count, written, sent, meant);
    *definition = written.data();
    *definition_size = written.size();
    *payload = sent.data();
    *payload_size = sent.size();
    *text = meant.c_str();
  });
}

// What workers have answered in earlier sessions. Only a device over a network remembers.
int sky_remember(int index, const char* data, uint64_t size) {
  return sky::guarded([&] {
    auto& session = sky::session_at(static_cast<c10::DeviceIndex>(index));
    if (session.remembered) session.remembered->read(data, size);
  });
}

// What this session's worker has answered, in the same form, until this thread's next call. `wrong`: an answer of an
// earlier session was not right.
int sky_learned(int index, const char** answer, uint64_t* size, int* wrong) {
  static thread_local std::string learned;
  return sky::guarded([&] {
    auto& session = sky::session_at(static_cast<c10::DeviceIndex>(index));
    *wrong = session.remembered && session.remembered->is_wrong;
    learned = session.remembered ? session.remembered->learned() : "";
    *answer = learned.data();
    *size = learned.size();
  });
}

// For tests: the coding of the op stream, both ways; `anew` begins another stream. Answers stay until the next call.
int sky_probe_encode(int anew, const char* raw, uint64_t size, const char** coded, uint64_t* coded_size) {
  static std::unique_ptr<sky::Encoder> encoder;
  static std::string out;
  return sky::guarded([&] {
    if (anew) encoder = std::make_unique<sky::Encoder>();
    out.clear();
    encoder->encode({raw, size}, out);
    *coded = out.data();
    *coded_size = out.size();
  });
}

int sky_probe_decode(int anew, const char* coded, uint64_t size, char* into, uint64_t room, uint64_t* given) {
  static std::unique_ptr<sky::Decoder> decoder;
  return sky::guarded([&] {
    if (anew) decoder = std::make_unique<sky::Decoder>();
    decoder->take(coded, size);
    *given = decoder->give(into, room);
  });
}

int sky_current() { return sky::current_device(); }
void sky_set_current(int index) { sky::set_current_device(static_cast<c10::DeviceIndex>(index)); }
int sky_count() { return sky::open_count(); }
}
