#include "links.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>

namespace sky {
namespace {

// What goes through this process is fetched in parts: one is sent on while the next is fetched.
constexpr uint64_t kPart = 8 << 20;
// Below, whoever has the content sends it: passing it on would save nothing.
constexpr uint64_t kRelayed = 1 << 20;
constexpr size_t kContentsMost = 4096;

struct Link {
  uint64_t number = 0;
  bool is_direct = false;
  std::string why_not;            // told where a copy takes the other way, once
  uint64_t passages[2] = {0, 0};  // from the session with the lower serial, and from the other
};

// A part of a storage.
struct Extent {
  uint32_t serial, slot;
  uint64_t offset, bytes;
  auto operator<=>(const Extent&) const = default;
};

// Where the same bytes are: all were copied from one extent, when its content had that version.
struct Holder {
  Extent extent;
  uint32_t version;
};
struct Content {
  uint32_t version;
  std::vector<Holder> holders;
};

// Held while both records of a copy are written, so that two copies come in the same order at both ends. A session's
// own mutex is taken with this one held, never the other way round, and never those of two sessions at once.
Mutex links_mutex;
std::map<std::pair<uint32_t, uint32_t>, Link>& links =
    *std::make_unique<std::map<std::pair<uint32_t, uint32_t>, Link>>().release();
std::map<Extent, Content>& contents = *std::make_unique<std::map<Extent, Content>>().release();

// Noted where a session's mutex is held, and looked at where the links are used.
std::mutex lost_mutex;
std::vector<uint64_t>& lost = *std::make_unique<std::vector<uint64_t>>().release();

// Whether a worker has told of a failure: a copy that was to be passed on may have no content.
std::atomic<bool> has_failed = false;

std::string name_of(const Session& session) { return "sky:" + std::to_string(session.index); }

// Empty, or why there is none.
std::string make_link(Session& dialer, Session& other, uint64_t number) {
  if (dialer.is_mesh() || other.is_mesh()) return "a mesh has no links to other devices";
  static thread_local std::vector<char> text(64 << 10);
  if (!introduce) return "this process has not been told how devices reach each other";
  if (introduce(dialer.index, other.index, number, text.data(), text.size())) return text.data();
  std::string description = text.data();
  Writer w;
  w.u32(kLink);
  w.text(description);
  std::lock_guard lock(dialer.mutex);
  dialer.begin();
  try {
    dialer.ask(w.bytes().data(), w.size());
  } catch (const std::exception& e) {
    dialer.check_open();
    return e.what();
  }
  return "";
}

// Tells the worker, if it is there, that the link is used no more.
void unlink(Session* session, uint64_t number, const std::string& why) {
  if (!session || session->is_retired()) return;
  Writer w, content;
  content.u64(number);
  content.text(why);
  w.u32(kUnlink);
  w.text(content.bytes());
  try {
    std::lock_guard lock(session->mutex);
    session->begin();
    session->put(w.bytes().data(), w.size());
  } catch (const std::exception&) {
    // It is gone as well.
  }
}

// The end that noticed the loss has told of it; the other may still wait for the connection to come back.
void drop_lost_links() {
  std::vector<uint64_t> numbers;
  {
    std::lock_guard lock(lost_mutex);
    numbers.swap(lost);
  }
  for (auto number : numbers) {
    auto found = std::find_if(links.begin(), links.end(), [&](auto& each) { return each.second.number == number; });
    if (found == links.end()) continue;
    auto [low, high] = found->first;
    links.erase(found);
    // What was to be passed on over it may be no content at all.
    contents.clear();
    for (auto serial : {low, high}) unlink(session_by_serial(serial), number, "the other end has lost the link");
  }
}

Link& link_between(Session& a, Session& b) {
  auto key = std::minmax(a.serial, b.serial);
  auto found = links.find(key);
  if (found != links.end()) return found->second;
  static std::mt19937_64 random{std::random_device{}()};
  Link link;
  link.number = random();
  auto why = make_link(a, b, link.number);
  if (!why.empty()) {
    link.number = random();
    auto why_not_back = make_link(b, a, link.number);
    link.is_direct = why_not_back.empty();
    if (why_not_back != why) why += "; " + why_not_back;
    link.why_not = why;
  } else {
    link.is_direct = true;
  }
  return links[key] = link;
}

void say_why_through_here(const Session& a, const Session& b, const std::string& why) {
  if (why.empty()) return;
  c10::warn(c10::Warning(c10::UserWarning(), {nullptr, nullptr, 0},
                         "copies between " + name_of(a) + " and " + name_of(b) +
                             " go through this process, because their nodes do not reach each other: " + why,
                         false));
}

struct __attribute__((packed)) PassageRecord {
  uint32_t kind, slot;
  uint64_t offset, bytes, link, passage;
};

// A copy of the bytes over a link; returns whether the source still has the version that is asked for.
bool pass(Session& source, const Extent& from, const uint32_t* version, uint32_t& seen, Session& target,
          const Extent& to, uint32_t& written) {
  auto& link = link_between(source, target);
  auto& count = link.passages[source.serial > target.serial];
  {
    std::lock_guard lock(source.mutex);
    seen = source.version(from.slot);
    if (version && seen != *version) return false;
    source.begin();
    PassageRecord record{kSend, from.slot, from.offset, from.bytes, link.number, count};
    source.put(&record, sizeof record);
    if (auto* noted = source.tape()) noted->blocked("a copy to another device");
    source.stats.sent_on += from.bytes;
  }
  PassageRecord record{kReceive, to.slot, to.offset, to.bytes, link.number, count++};
  std::lock_guard lock(target.mutex);
  target.begin();
  target.version(to.slot);
  target.wrote(to.slot);
  written = target.version(to.slot);
  target.put(&record, sizeof record);
  if (auto* noted = target.tape()) noted->blocked("a copy from another device");
  target.stats.taken_over += to.bytes;
  return true;
}

uint32_t version_of(Session& session, uint32_t slot) {
  std::lock_guard lock(session.mutex);
  return session.version(slot);
}

// What a function may write to meanwhile is neither passed on nor counted as the same later.
bool is_exported(Session& session, uint32_t slot) {
  std::lock_guard lock(session.mutex);
  return session.is_exported(slot);
}

// The last to have got the same content passes it on: so every node sends it once, however many get it.
bool relay(const Extent& from, Session& source, const Extent& to, Session& target) {
  auto found = contents.find(from);
  if (found == contents.end() || found->second.version != version_of(source, from.slot)) return false;
  auto& holders = found->second.holders;
  for (auto holder = holders.rbegin(); holder != holders.rend(); ++holder) {
    auto* session = session_by_serial(holder->extent.serial);
    if (!session || session == &target || session->is_retired()) continue;
    uint32_t seen, written;
    try {
      // Before a link is made for it.
      if (is_exported(*session, holder->extent.slot) || version_of(*session, holder->extent.slot) != holder->version)
        continue;
      if (!link_between(*session, target).is_direct) continue;
      if (!pass(*session, holder->extent, &holder->version, seen, target, to, written)) continue;
    } catch (const std::exception&) {
      target.check_open();
      continue;  // the holder is gone
    }
    holders.push_back({to, written});
    return true;
  }
  return false;
}

void remember(const Extent& from, uint32_t version, const Extent& to, uint32_t written) {
  if (contents.size() >= kContentsMost) contents.clear();
  contents[from] = {version, {{to, written}}};
}

at::Tensor bytes_of(const at::Tensor& t, uint64_t offset, uint64_t size) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(t.storage()), t.key_set(),
                                                   c10::scalarTypeToTypeMeta(c10::kByte));
  impl->set_sizes_contiguous({static_cast<int64_t>(size)});
  impl->set_storage_offset(static_cast<int64_t>(static_cast<uint64_t>(t.storage_offset()) * t.itemsize() + offset));
  return at::Tensor(std::move(impl));
}

void copy_through_here(const at::Tensor& from, Session& source, Session& target, const Extent& to) {
  for (uint64_t done = 0; done < to.bytes;) {
    auto n = std::min(kPart, to.bytes - done);
    auto host = at::empty({static_cast<int64_t>(n)}, at::TensorOptions().dtype(c10::kByte));
    source.fetch(bytes_of(from, done, n), host.mutable_data_ptr(), n);
    target.upload(to.slot, to.offset + done, host, /*later=*/true);
    done += n;
  }
}

// Both are dense, and laid out alike.
void move_bytes(const at::Tensor& to, const at::Tensor& from) {
  Session::unshare(to.unsafeGetTensorImpl());
  auto a = Session::place_of(from.unsafeGetTensorImpl()), b = Session::place_of(to.unsafeGetTensorImpl());
  a.session.check_open();  // in a forked child, before a mutex that may have been held when it was forked
  b.session.check_open();
  uint64_t bytes = from.nbytes(), item = from.itemsize();
  Extent source{a.session.serial, a.slot, static_cast<uint64_t>(a.offset) * item, bytes};
  Extent target{b.session.serial, b.slot, static_cast<uint64_t>(b.offset) * item, bytes};
  std::string why_through_here;
  {
    std::lock_guard lock(links_mutex);
    drop_lost_links();
    if (has_failed.exchange(false)) contents.clear();
    bool relays = bytes >= kRelayed && !is_exported(a.session, a.slot);
    if (relays && relay(source, a.session, target, b.session)) return;
    auto& link = link_between(a.session, b.session);
    if (link.is_direct) {
      uint32_t seen, written;
      pass(a.session, source, nullptr, seen, b.session, target, written);
      if (relays) remember(source, seen, target, written);
      return;
    }
    why_through_here = std::exchange(link.why_not, "");
  }
  say_why_through_here(a.session, b.session, why_through_here);
  copy_through_here(from, a.session, b.session, target);
}

// A dimension that repeats its elements is sent once.
at::Tensor without_repeats(at::Tensor t) {
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.stride(d) == 0 && t.size(d) > 1) t = t.narrow(d, 0, 1);
  return t;
}

}  // namespace

void copy_between(const at::Tensor& to, const at::Tensor& given) {
  (void)given.expand(to.sizes());
  auto from = without_repeats(given);
  // Where it is smaller: there, or here.
  if (from.itemsize() > to.itemsize()) from = from.to(to.scalar_type());
  if (!from.is_non_overlapping_and_dense()) from = from.contiguous();
  bool is_alike = from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
                  (from.strides() == to.strides() || (from.is_contiguous() && to.is_contiguous()));
  auto landing =
      is_alike ? to : at::empty_strided(from.sizes(), from.strides(), to.options().dtype(from.scalar_type()));
  move_bytes(landing, from);
  if (!is_alike) to.copy_(landing);
  if (C10_UNLIKELY(synchronous())) Session::of(to.unsafeGetTensorImpl()).synchronize(kAllStreams);
}

void note_failed_copies() noexcept { has_failed = true; }

void note_lost_links(std::string_view numbers) {
  std::lock_guard lock(lost_mutex);
  for (uint64_t number; numbers.size() >= sizeof number; numbers.remove_prefix(sizeof number)) {
    std::memcpy(&number, numbers.data(), sizeof number);
    lost.push_back(number);
  }
}

void end_links(const Session& gone, const std::string& why) noexcept try {
  std::lock_guard lock(links_mutex);
  // Another session may take this one's place, under the same serial and with other contents.
  contents.clear();
  for (auto each = links.begin(); each != links.end();) {
    auto [low, high] = each->first;
    if (low != gone.serial && high != gone.serial) {
      ++each;
      continue;
    }
    auto* other = session_by_serial(low == gone.serial ? high : low);
    auto link = each->second;
    each = links.erase(each);
    if (link.is_direct) unlink(other, link.number, why);
  }
} catch (...) {
  // No memory: then nobody is told, and the workers notice by themselves.
}

}  // namespace sky
