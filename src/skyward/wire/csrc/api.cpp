// The plain C interface: for Python's ctypes, and for the device's cores, which get a table of functions.
#include <cstring>

#include "link.h"
#include "link_functions.h"

namespace {

using sky::Connection;
using sky::Keeper;
using sky::Link;

// What a handle leads to. It stays when the link is freed: a core may still end what has ended long ago.
template <typename T>
struct Handle {
  std::mutex mutex;
  std::shared_ptr<T> held;
  std::weak_ptr<T> was;  // what was freed, as long as a thread uses it
  const uint32_t forks = sky::forks();

  // Null if it was freed, or belongs to the process that has forked this one.
  std::shared_ptr<T> get() {
    if (forks != sky::forks()) return nullptr;
    std::lock_guard lock(mutex);
    return held;
  }
  std::shared_ptr<T> take() {
    if (forks != sky::forks()) return nullptr;
    std::lock_guard lock(mutex);
    was = held;
    return std::move(held);
  }
};

std::shared_ptr<Link> link_of(void* handle) { return static_cast<Handle<Link>*>(handle)->get(); }
std::shared_ptr<Connection> connection_of(void* handle) { return static_cast<Handle<Connection>*>(handle)->get(); }

std::string why_none(void* handle) {
  auto is_here = static_cast<Handle<Link>*>(handle)->forks == sky::forks();
  return is_here ? "the link was closed" : "the link belongs to the process that has forked this one";
}

void tell(char* into, size_t size, const std::string& text) {
  if (!size) return;
  auto n = std::min(size - 1, text.size());
  std::memcpy(into, text.data(), n);
  into[n] = '\0';
}

// What `f` says of the link, or -1 once it has ended.
template <typename F>
int64_t unless_ended(void* handle, F&& f) {
  auto link = link_of(handle);
  if (!link) return -1;
  try {
    return static_cast<int64_t>(f(*link));
  } catch (const std::exception& e) {
    // Out of memory, perhaps; who reads on would read the wrong bytes.
    link->end(e.what());
    return -1;
  }
}

// What of Python a small message needs. It is stable, so that no header of Python is needed.
struct Method;
struct Buffer {
  void *data, *owner;
  ssize_t size, item_size;
  int is_readonly, dimensions;
  char* format;
  ssize_t *shape, *strides, *suboffsets;
  void* internal;
};
struct Python {
  int (*PyObject_GetBuffer)(void* object, Buffer* buffer, int flags);
  void (*PyBuffer_Release)(Buffer* buffer);
  void* (*PyLong_AsVoidPtr)(void* object);
  long long (*PyLong_AsLongLong)(void* object);
  void* (*PyLong_FromLongLong)(long long value);
  void* (*PyErr_Occurred)();
  void* (*PyEval_SaveThread)();
  void (*PyEval_RestoreThread)(void* state);
  void* (*PyCFunction_NewEx)(const Method* method, void* self, void* module);
} python;
struct Method {
  const char* name;
  void* (*function)(void* self, void* const* arguments, ssize_t count);
  int flags;
  const char* doc;
};
constexpr int kFastCall = 0x80;
constexpr int kReadable = 0, kWritable = 1;

// For a function of Python's that gets memory and a number: what `f` says of the link, the memory and the number,
// without the interpreter's lock; or -1 once the link has ended. Null if the arguments are wrong.
template <typename F>
void* with_memory(void* self, void* const* arguments, ssize_t count, int flags, F&& f) {
  if (count != 2) return nullptr;
  auto* handle = python.PyLong_AsVoidPtr(self);
  auto number = python.PyLong_AsLongLong(arguments[1]);
  if (number == -1 && python.PyErr_Occurred()) return nullptr;
  Buffer buffer;
  if (python.PyObject_GetBuffer(arguments[0], &buffer, flags)) return nullptr;
  auto* state = python.PyEval_SaveThread();
  auto outcome = unless_ended(handle, [&](Link& link) {
    return f(link, buffer.data, static_cast<uint64_t>(buffer.size), static_cast<int>(number));
  });
  python.PyEval_RestoreThread(state);
  python.PyBuffer_Release(&buffer);
  return python.PyLong_FromLongLong(outcome);
}

std::vector<std::shared_ptr<Link>> all_of(void* const* handles, int count) {
  std::vector<std::shared_ptr<Link>> links;
  for (int i = 0; i < count; ++i) {
    links.push_back(link_of(handles[i]));
    if (!links.back()) throw sky::LinkEnded(why_none(handles[i]));
  }
  return links;
}

int64_t send(void* handle, const void* data, uint64_t size, int at_once) {
  return unless_ended(handle, [&](Link& link) { return link.send(data, size, at_once); });
}

int64_t receive(void* handle, void* into, uint64_t size, int milliseconds) {
  return unless_ended(handle, [&](Link& link) { return link.receive(into, size, milliseconds); });
}

int64_t await_bytes(void* handle, int milliseconds) {
  return unless_ended(handle, [&](Link& link) { return link.await_bytes(milliseconds); });
}

int64_t send_striped(void* const* handles, int count, const void* data, uint64_t size, uint64_t done, uint64_t stripe,
                     void* owner, void (*release)(void*)) {
  std::shared_ptr<void> held;
  if (owner) held.reset(owner, release);
  return unless_ended(handles[0], [&](Link&) {
    sky::send_striped(all_of(handles, count), static_cast<const char*>(data), size, done, stripe, held);
    return size;
  });
}

int64_t receive_striped(void* const* handles, int count, void* into, uint64_t size, uint64_t done, uint64_t stripe,
                        uint64_t* progress, int milliseconds, void (*reached)(void*, uint64_t), void* context) {
  std::function<void(uint64_t)> told;
  if (reached) told = [&](uint64_t bytes) { reached(context, bytes); };
  return unless_ended(handles[0], [&](Link&) {
    return sky::receive_striped(all_of(handles, count), static_cast<char*>(into), size, done, stripe, progress,
                                milliseconds, told);
  });
}

// A core that ends its link knows that it has.
void end(void* handle, const char* why) {
  if (auto link = link_of(handle)) link->end(why, false);
}

void why(void* handle, char* into, size_t size) {
  auto link = link_of(handle);
  tell(into, size, link ? link->why() : why_none(handle));
}

constexpr sky_link_functions kFunctions{send, receive, await_bytes, send_striped, receive_striped, end, why};

}  // namespace

extern "C" {

const sky_link_functions* sky_link_table() { return &kFunctions; }

// Never closed: connections use its functions as long as the process lives.
void* sky_openssl(const char* path, char* problem, size_t size) try {
  return new std::shared_ptr<const sky::OpenSsl>(std::make_shared<sky::OpenSsl>(path));
} catch (const std::exception& e) {
  tell(problem, size, e.what());
  return nullptr;
}

// Its version, and the file that it is in.
void sky_openssl_name(void* library, char* into, size_t size) {
  tell(into, size, (*static_cast<std::shared_ptr<const sky::OpenSsl>*>(library))->name());
}

void* sky_context_new(void* library, const char* authority, const char* certificate, const char* key, int server,
                      int kernel, char* problem, size_t size) try {
  auto& used = *static_cast<std::shared_ptr<const sky::OpenSsl>*>(library);
  return new std::shared_ptr<const sky::TlsContext>(
      std::make_shared<sky::TlsContext>(used, authority, certificate, key, server, kernel));
} catch (const std::exception& e) {
  tell(problem, size, e.what());
  return nullptr;
}

void sky_context_free(void* context) { delete static_cast<std::shared_ptr<const sky::TlsContext>*>(context); }

void* sky_connection_new(int fd, void* context, const char* name, char* problem, size_t size) try {
  std::shared_ptr<const sky::TlsContext> used;
  if (context) used = *static_cast<std::shared_ptr<const sky::TlsContext>*>(context);
  auto made = std::make_shared<Connection>(fd, std::move(used), name);
  auto* handle = new Handle<Connection>;
  handle->held = std::move(made);
  return handle;
} catch (const std::exception& e) {
  tell(problem, size, e.what());
  return nullptr;
}

int sky_connection_shake(void* handle, int milliseconds) {
  auto connection = connection_of(handle);
  return connection ? connection->shake(milliseconds) : Connection::kOver;
}

// How many bytes, at least one; 0 if none moved within that time; -1 at the end.
int64_t sky_connection_read(void* handle, void* into, size_t size, int milliseconds) {
  auto from = connection_of(handle);
  if (!from) return Connection::kOver;
  auto n = from->read(into, size);
  if (n == Connection::kNotNow && from->await(true, milliseconds)) n = from->read(into, size);
  return n;
}

int64_t sky_connection_write(void* handle, const void* data, size_t size, int milliseconds) {
  auto to = connection_of(handle);
  if (!to) return Connection::kOver;
  auto n = to->write(data, size);
  if (n == Connection::kNotNow && to->await(false, milliseconds)) n = to->write(data, size);
  return n;
}

// Writes as long as the kernel takes more within that time: how many bytes; -1 at the end.
int64_t sky_connection_write_all(void* handle, const void* data, size_t size, int milliseconds) {
  auto to = connection_of(handle);
  auto* from = static_cast<const char*>(data);
  size_t done = 0;
  while (to && done < size) {
    auto n = to->write(from + done, size - done);
    if (n == Connection::kOver) return n;
    if (n == Connection::kNotNow && !to->await(false, milliseconds)) break;
    done += static_cast<size_t>(n);
  }
  return to ? static_cast<int64_t>(done) : Connection::kOver;
}

// Whether bytes may be read although the socket has none.
int sky_connection_pending(void* handle) {
  auto connection = connection_of(handle);
  return connection && connection->has_pending();
}

void sky_connection_peer(void* handle, char* into, size_t size) {
  auto connection = connection_of(handle);
  tell(into, size, connection ? connection->peer() : "");
}

void sky_connection_why(void* handle, char* into, size_t size) {
  auto connection = connection_of(handle);
  tell(into, size, connection ? connection->why() : "the connection was closed");
}

void sky_connection_shut(void* handle) {
  if (auto connection = connection_of(handle)) connection->shut();
}

// Threads that use it keep it until they are done.
void sky_connection_close(void* handle) { static_cast<Handle<Connection>*>(handle)->take(); }

void sky_connection_free(void* handle) { delete static_cast<Handle<Connection>*>(handle); }

void* sky_link_new(uint64_t number, uint64_t window, double patience, const char* other, int is_of_calls, char* problem,
                   size_t size) try {
  auto handle = std::make_unique<Handle<Link>>();
  handle->held = std::make_shared<Link>(window, patience, other, is_of_calls);
  Keeper::instance().add(handle->held, number);
  return handle.release();
} catch (const std::exception& e) {
  // No descriptors are left, perhaps.
  tell(problem, size, e.what());
  return nullptr;
}

// Takes the connections over. One of them may be missing: somebody has closed it.
void sky_link_install(void* handle, void* out, void* in, uint64_t arrived, uint32_t attempt) {
  auto sender = static_cast<Handle<Connection>*>(out)->take();
  auto receiver = static_cast<Handle<Connection>*>(in)->take();
  if (!sender || !receiver) return;
  unless_ended(handle, [&](Link& link) {
    link.install(std::make_shared<sky::Pair>(std::move(sender), std::move(receiver), arrived, attempt));
    return 0;
  });
}

int64_t sky_link_suspend(void* handle, uint32_t attempt) {
  auto link = link_of(handle);
  return link ? link->suspend(attempt) : -1;
}

void sky_link_end(void* handle, const char* text) {
  if (auto link = link_of(handle)) link->end(text);
}
void sky_link_why(void* handle, char* into, size_t size) { why(handle, into, size); }

void sky_link_reconnect(void* handle) {
  if (auto link = link_of(handle)) link->reconnect();
}

struct LinkFacts {
  uint64_t received, on_wire, kept, is_connected, has_pair, striped;
};

void sky_link_facts(void* handle, LinkFacts* facts) {
  auto link = link_of(handle);
  *facts = {};
  if (link)
    *facts = {link->received(), link->on_wire(), link->kept(), link->is_connected(), link->has_pair(), link->striped()};
}

void sky_link_free(void* handle, uint64_t number) {
  if (static_cast<Handle<Link>*>(handle)->forks != sky::forks()) return;
  auto link = static_cast<Handle<Link>*>(handle)->take();
  Keeper::instance().remove(number);
  if (link) link->end("the link was closed");
}

// A link of calls; all return -1 once it has ended.

// Small messages: functions that Python calls as its own, with the link's handle as `self`.

void* sky_link_send(void* self, void* const* arguments, ssize_t count) {
  return with_memory(self, arguments, count, kReadable, [](Link& link, void* data, uint64_t size, int is_patient) {
    return link.send_call(data, size, is_patient), 0;
  });
}

void* sky_link_receive(void* self, void* const* arguments, ssize_t count) {
  return with_memory(self, arguments, count, kWritable, [](Link& link, void* into, uint64_t size, int milliseconds) {
    return link.receive_call(into, size, milliseconds);
  });
}

void* sky_link_peek(void* self, void* const* arguments, ssize_t count) {
  return with_memory(self, arguments, count, kWritable, [](Link& link, void* into, uint64_t size, int most) {
    return link.peek(into, std::min(size, static_cast<uint64_t>(most)));
  });
}

void* sky_link_skip(void* self, void* const* arguments, ssize_t count) {
  if (count != 1) return nullptr;
  auto size = python.PyLong_AsLongLong(arguments[0]);
  if (size == -1 && python.PyErr_Occurred()) return nullptr;
  auto* handle = python.PyLong_AsVoidPtr(self);
  auto skip = [&](Link& link) { return link.skip(static_cast<uint64_t>(size)), 0; };
  // It may send counts, and then encrypts what waits.
  auto* state = python.PyEval_SaveThread();
  auto outcome = unless_ended(handle, skip);
  python.PyEval_RestoreThread(state);
  return python.PyLong_FromLongLong(outcome);
}

void sky_python(const Python* functions) { python = *functions; }

void* sky_link_method(int which, void* self) {
  // Python's functions use these as long as they live.
  static const Method methods[]{{"send", sky_link_send, kFastCall, nullptr},
                                {"receive", sky_link_receive, kFastCall, nullptr},
                                {"peek", sky_link_peek, kFastCall, nullptr},
                                {"skip", sky_link_skip, kFastCall, nullptr}};
  return python.PyCFunction_NewEx(&methods[which], self, nullptr);
}

// Says where in the stream it begins and ends.
int64_t sky_link_begin_large(void* handle, const void* const* data, const uint64_t* sizes, int count, uint64_t* first,
                             uint64_t* last) {
  return unless_ended(handle, [&](Link& link) {
    std::vector<std::pair<const char*, uint64_t>> parts;
    for (int i = 0; i < count; ++i) parts.emplace_back(static_cast<const char*>(data[i]), sizes[i]);
    *last = link.begin_large(parts, *first);
    return 0;
  });
}

// 1 when it is out, 0 if the time has passed.
int64_t sky_link_await_large(void* handle, uint64_t last, int milliseconds) {
  return unless_ended(handle, [&](Link& link) { return link.await_large(last, milliseconds); });
}

void sky_link_finish_large(void* handle, uint64_t first, uint64_t last) {
  auto& place = *static_cast<Handle<Link>*>(handle);
  auto link = place.get();
  if (!link) link = place.was.lock();
  if (!link) return;
  try {
    link->finish_large(first, last);
  } catch (const std::exception& e) {
    // No memory for a copy: what is left of the write cannot be sent any more.
    link->end(e.what());
    link->finish_large(first, last);
  }
}

int64_t sky_link_await_room(void* handle, uint64_t most, int milliseconds) {
  return unless_ended(handle, [&](Link& link) { return link.await_room(most, milliseconds); });
}

int64_t sky_link_receive_large(void* handle, void* const* places, const uint64_t* sizes, int count, uint64_t* done,
                               int milliseconds) {
  return unless_ended(handle, [&](Link& link) {
    std::vector<sky::Place> all;
    for (int i = 0; i < count; ++i) all.push_back({static_cast<char*>(places[i]), sizes[i]});
    return link.receive_large(all, *done, milliseconds), 0;
  });
}

int sky_link_adopt(void* handle) {
  auto link = link_of(handle);
  return link ? link->adopt() : -1;
}

int sky_link_takes_stripes(void* handle, uint32_t attempt) {
  auto link = link_of(handle);
  return link && link->takes_stripes(attempt);
}

// Takes the connection over.
void sky_link_add_stripe(void* handle, uint32_t attempt, uint32_t number, void* connection, int to_send) {
  auto taken = static_cast<Handle<Connection>*>(connection)->take();
  auto link = link_of(handle);
  if (link && taken) link->add_stripe(attempt, number, std::move(taken), to_send);
}

// For one thread of Python's, which looks after all links until one of them needs Python.
int sky_links_run(uint64_t* number) { return Keeper::instance().run(*number); }
}
