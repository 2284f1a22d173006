#include "warnings.h"

#include <mutex>
#include <set>
#include <typeinfo>
#include <utility>

#include "../wire/records.h"

namespace sky {
namespace {

constexpr size_t kWaitingMost = 1000, kNamesMost = 1000;

// A warning points to the name of its file and may outlive the session; there are few names.
const char* lasting(const std::string& name) {
  static std::mutex mutex;
  static std::set<std::string> names;
  if (name.empty()) return nullptr;
  std::lock_guard lock(mutex);
  if (names.size() >= kNamesMost && !names.count(name)) return nullptr;
  return names.insert(name).first->c_str();
}

}  // namespace

void Warnings::take_from(std::string& content) {
  Reader r(content.data(), content.size());
  auto written = r.text();
  Reader each(written.data(), written.size());
  while (each.left()) {
    auto flags = each.u8();
    auto file = each.text();
    auto line = each.u32();
    auto text = each.text();
    c10::Warning::warning_variant_t type = c10::UserWarning();
    if (flags & kDeprecation) type = c10::DeprecationWarning();
    if (waiting_.size() < kWaitingMost)
      waiting_.emplace_back(type, c10::SourceLocation{"", lasting(file), line}, std::move(text), flags & kVerbatim);
  }
  content.erase(0, content.size() - r.left());
}

void Warnings::raise() {
  if (waiting_.empty()) return;
  // The handler that PyTorch's Python binding puts up around a call is another one.
  if (typeid(*c10::WarningUtils::get_warning_handler()) == typeid(c10::WarningHandler)) return;
  for (auto& warning : std::exchange(waiting_, {})) c10::warn(warning);
}

}  // namespace sky
