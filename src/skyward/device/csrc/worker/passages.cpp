// What comes from other devices, and goes to them. The session hands both over to the link and goes on; it waits where
// an operation reads what has not arrived, or writes to what has not left.
#include "peers.h"
#include "session.h"

namespace sky {
namespace {

constexpr size_t kTracked = 64;

void drop_finished(std::vector<std::shared_ptr<Passage>>& passages) {
  std::erase_if(passages, [](auto& passage) { return passage->is_over(); });
}

}  // namespace

void Session::link(Reader& r) {
  auto length = r.left();
  std::string description(r.bytes(length), length);
  char message[2048] = "it makes no links";
  if (links_.make && !links_.make(description.c_str(), message, sizeof message)) reply(kOk, "");
  else reply(kFailed, message);
}

// A mesh, or process groups in it.
void Session::join(Reader& r) {
  auto length = r.left();
  std::string description(r.bytes(length), length);
  char message[2048] = "it joins no mesh";
  if (links_.join && !links_.join(description.c_str(), message, sizeof message)) reply(kOk, "");
  else reply(kFailed, message);
}

void Session::unlink(Reader& r) {
  auto link = r.u64();
  Peers::all().end(link, r.text());
  if (links_.end) links_.end(link);
}

void Session::track(std::shared_ptr<Passage> passage) {
  if (passages_.size() >= kTracked && !(passages_.size() & (passages_.size() - 1))) {
    for (auto& each : passages_)
      if (each->is_over())
        if (auto reason = each->wait(); reason && !first_error_) first_error_ = reason;
    drop_finished(passages_);
  }
  passages_.push_back(std::move(passage));
}

bool Session::has_passages() {
  return std::any_of(passages_.begin(), passages_.end(), [](auto& passage) { return !passage->is_over(); });
}

// All that was asked for has arrived and left, as far as it will.
void Session::finish_passages() {
  for (auto& passage : passages_)
    if (auto reason = passage->wait(); reason && !first_error_) first_error_ = reason;
  passages_.clear();
}

void Session::await_arrivals(Slot& held) {
  for (auto& passage : held.traffic->arriving)
    if (auto reason = passage->wait()) {
      if (!held.poison) held.poison = reason;
      // Told once: a wait for the whole device has told it, or need not tell it again.
      if (std::erase(passages_, passage) && !first_error_) first_error_ = reason;
    }
  held.traffic->arriving.clear();
}

// Why one failed is told where its bytes are read.
void Session::await_passages_of_graphs() {
  for (auto& passage : passages_)
    if (passage->is_of_graph) passage->wait();
}

void Session::settle_traffic(Slot& held, bool written) {
  await_arrivals(held);
  auto& leaving = held.traffic->leaving;
  if (written) {
    for (auto& passage : leaving) passage->wait();
    leaving.clear();
  } else {
    drop_finished(leaving);
  }
  if (leaving.empty()) held.traffic.reset();
}

void Session::send_to_peer(Reader& r) {
  show_memory();
  auto& held = slots_[r.u32()];
  auto offset = r.u64(), bytes = r.u64(), link = r.u64(), number = r.u64();
  auto passage = std::make_shared<Passage>(link, number, offset, bytes);
  passage->is_of_graph = held.is_of_graph;
  if (held.traffic) {
    std::vector<std::shared_ptr<Passage>> coming;
    for (auto& each : held.traffic->arriving)
      if (each->touches(offset, bytes) && !each->is_over()) coming.push_back(each);
    // What is still coming is passed on as it comes, if it is one thing.
    if (coming.size() == 1 && coming[0]->covers(offset, bytes)) passage->source = coming[0];
    else settle(held, false);
  }
  if (held.poison) {
    passage->refused = held.poison;
  } else if (!held.has_memory() || bytes > held.memory().nbytes() || offset > held.memory().nbytes() - bytes) {
    passage->refused = note({std::to_string(bytes) + " bytes at " + std::to_string(offset) + " are not in the storage",
                             kFailed, "copying to another device"});
  } else {
    passage->memory = held.memory();
    attempt("copying to another device", [&] { streams_.mark(passage->may_begin); });
    if (!held.traffic) held.traffic = std::make_unique<Traffic>();
    drop_finished(held.traffic->leaving);
    held.traffic->leaving.push_back(passage);
  }
  track(passage);
  Peers::all().send(std::move(passage), device_);
}

void Session::receive_from_peer(Reader& r) {
  show_memory();
  auto& held = slots_[r.u32()];
  auto offset = r.u64(), bytes = r.u64(), link = r.u64(), number = r.u64();
  auto passage = std::make_shared<Passage>(link, number, offset, bytes);
  passage->is_of_graph = held.is_of_graph;
  if (held.traffic) {
    // One link brings its bytes in order; those of two links would mix.
    auto& arriving = held.traffic->arriving;
    bool is_in_order = std::all_of(arriving.begin(), arriving.end(), [&](auto& each) { return each->link == link; });
    if (!is_in_order) await_arrivals(held);
    for (auto& each : held.traffic->leaving) each->wait();
    held.traffic->leaving.clear();
    drop_finished(arriving);
  }
  // What overwrites all of a tensor mends it.
  if (held.poison && held.has_memory() && offset == 0 && bytes == held.memory().nbytes()) held.poison.reset();
  bool fits =
      !held.poison && held.has_memory() && bytes <= held.memory().nbytes() && offset <= held.memory().nbytes() - bytes;
  if (fits) {
    passage->memory = held.memory();
    attempt("copying from another device", [&] { streams_.mark(passage->may_begin); });
    if (!held.traffic) held.traffic = std::make_unique<Traffic>();
    held.traffic->arriving.push_back(passage);
  } else if (!held.poison) {
    held.poison = note({std::to_string(bytes) + " bytes at " + std::to_string(offset) + " do not fit the storage",
                        kFailed, "copying from another device"});
  }
  track(passage);
  Peers::all().expect(std::move(passage), device_);
}

}  // namespace sky
