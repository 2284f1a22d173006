// Keys: what of an operation's arguments decides its result's shape, and the rest, which goes into the payload.
#pragma once

#include "operations.h"

namespace sky {

struct Key {
  std::vector<uint64_t> words;
  std::string payload;
  std::vector<at::Tensor> tensors;  // sky tensors in order, for what is resized
  std::vector<at::Tensor> moved;    // host indices brought over, alive until the record is out
  Session* session = nullptr;
  bool masked = false;
  void clear() {
    words.clear();
    payload.clear();
    tensors.clear();
    moved.clear();
    session = nullptr;
    masked = false;
  }
  uint64_t settings = 0;
  void word(uint64_t v) { words.push_back(v); }
  void raw(const void* p, size_t n) { payload.append(static_cast<const char*>(p), n); }
};

// The first sky tensor or device among the arguments decides where an operation runs.
Session* find_session(const c10::IValue& v);

// Settings decide results, so they are part of the key; the usual ones are left out of it.
void key_settings(Key& key);

// Adds an operation's arguments to its key and payload.
void key_arguments(Key& key, const OpInfo& op, const c10::IValue* args);

// What the template says of the arguments; the key is theirs.
void write_arguments(Writer& w, const Key& key, const OpInfo& op, const c10::IValue* args);

// What the payload consists of: Field letters. The key is the arguments'.
std::string payload_fields(const Key& key, const OpInfo& op, const c10::IValue* args);

uint64_t hash(const OpInfo* op, const std::vector<uint64_t>& words);

}  // namespace sky
