// The plain C interface: for Python's ctypes, and for the device's cores, which get a table of functions.
#include <cstring>

#include "link.h"
#include "link_functions.h"

namespace {

using sky::Connection;
using sky::Keeper;
using sky::Link;

// What a handle leads to. It stays when the link is freed: a core may still end what has ended long ago.
struct Handle {
  std::mutex mutex;
  std::shared_ptr<Link> link;
  const uint32_t forks = sky::forks();
};

// The link, or null if it was freed or belongs to the process that has forked this one.
std::shared_ptr<Link> link_of(void* handle) {
  auto& place = *static_cast<Handle*>(handle);
  if (place.forks != sky::forks()) return nullptr;
  std::lock_guard lock(place.mutex);
  return place.link;
}

std::string why_none(void* handle) {
  auto is_here = static_cast<Handle*>(handle)->forks == sky::forks();
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
  return new Connection(fd, std::move(used), name);
} catch (const std::exception& e) {
  tell(problem, size, e.what());
  return nullptr;
}

int sky_connection_shake(void* connection, int milliseconds) {
  return static_cast<Connection*>(connection)->shake(milliseconds);
}

// How many bytes; 0 if none moved within that time; -1 at the end.
int64_t sky_connection_read(void* connection, void* into, size_t size, int milliseconds) {
  auto& from = *static_cast<Connection*>(connection);
  auto n = from.read(into, size);
  if (n == Connection::kNotNow && from.await(true, milliseconds)) n = from.read(into, size);
  return n;
}

int64_t sky_connection_write(void* connection, const void* data, size_t size, int milliseconds) {
  auto& to = *static_cast<Connection*>(connection);
  auto n = to.write(data, size);
  if (n == Connection::kNotNow && to.await(false, milliseconds)) n = to.write(data, size);
  return n;
}

void sky_connection_peer(void* connection, char* into, size_t size) {
  tell(into, size, static_cast<Connection*>(connection)->peer());
}

void sky_connection_why(void* connection, char* into, size_t size) {
  tell(into, size, static_cast<Connection*>(connection)->why());
}

void sky_connection_shut(void* connection) { static_cast<Connection*>(connection)->shut(); }

void sky_connection_free(void* connection) { delete static_cast<Connection*>(connection); }

void* sky_link_new(uint64_t number, uint64_t window, double patience, const char* other, char* problem,
                   size_t size) try {
  auto handle = std::make_unique<Handle>();
  handle->link = std::make_shared<Link>(window, patience, other);
  Keeper::instance().add(handle->link, number);
  return handle.release();
} catch (const std::exception& e) {
  // No descriptors are left, perhaps.
  tell(problem, size, e.what());
  return nullptr;
}

// Takes the connections over. One of them may be missing: somebody has closed it.
void sky_link_install(void* handle, void* out, void* in, uint64_t arrived, uint32_t attempt) {
  std::unique_ptr<Connection> sender(static_cast<Connection*>(out)), receiver(static_cast<Connection*>(in));
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
  uint64_t received, on_wire, kept, is_connected;
};

void sky_link_facts(void* handle, LinkFacts* facts) {
  auto link = link_of(handle);
  *facts = {};
  if (link) *facts = {link->received(), link->on_wire(), link->kept(), link->is_connected()};
}

void sky_link_free(void* handle, uint64_t number) {
  auto& place = *static_cast<Handle*>(handle);
  if (place.forks != sky::forks()) return;
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(place.mutex);
    link.swap(place.link);
  }
  Keeper::instance().remove(number);
  if (link) link->end("the link was closed");
}

// For one thread of Python's, which looks after all links until one of them needs Python.
int sky_links_run(uint64_t* number) { return Keeper::instance().run(*number); }
}
