// What bytes over TLS cost two plain C++ programs: blocking sockets, one thread for each connection, and nothing kept.
//
// tls_floor serve LIBRARY AUTHORITY CERTIFICATE KEY             prints its port, and serves until its input ends
// tls_floor ask LIBRARY AUTHORITY CERTIFICATE KEY PORT STREAMS  carries out the lines of its input, and prints for each
//                                                               the seconds and the processor's seconds that it took:
//   ping ROUNDS     a few bytes to and fro over one connection; the seconds are the median of a round's
//   send BYTES      over all streams, until the other end has all of them
//   receive BYTES
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>
#include <vector>

#include "../src/skyward/wire/csrc/openssl.h"

namespace {

using namespace sky;

constexpr size_t kPing = 64, kStep = 1 << 20;
enum Wish : uint64_t { kPingPong, kTake, kGive };

struct Request {
  uint64_t wish, amount;
};

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

std::string content(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

SSL_CTX* context_of(const OpenSsl& ssl, char** paths, bool server) {
  auto* context = ssl.SSL_CTX_new(server ? ssl.TLS_server_method() : ssl.TLS_client_method());
  ssl.SSL_CTX_ctrl(context, kSetMinimum, kTls13, nullptr);
  ssl.SSL_CTX_set_verify(context, kVerifyPeer | kFailWithoutPeer, nullptr);
  if (server) ssl.SSL_CTX_set_num_tickets(context, 0);
  auto memory = [&](const std::string& text) {
    return ssl.BIO_new_mem_buf(text.data(), static_cast<int>(text.size()));
  };
  auto authority = content(paths[0]), certificate = content(paths[1]), key = content(paths[2]);
  auto* trusted = ssl.PEM_read_bio_X509(memory(authority), nullptr, nullptr, nullptr);
  auto* own = ssl.PEM_read_bio_X509(memory(certificate), nullptr, nullptr, nullptr);
  auto* secret = ssl.PEM_read_bio_PrivateKey(memory(key), nullptr, nullptr, nullptr);
  if (!trusted || !own || !secret) fail("the certificates cannot be read");
  ssl.X509_STORE_add_cert(ssl.SSL_CTX_get_cert_store(context), trusted);
  if (!ssl.SSL_CTX_use_certificate(context, own) || !ssl.SSL_CTX_use_PrivateKey(context, secret)) fail(ssl.problem());
  return context;
}

class Plain {
 public:
  Plain(const OpenSsl& ssl, SSL_CTX* context, int fd, bool server) : ssl_(ssl), session_(ssl.SSL_new(context)) {
    int one = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    ssl_.SSL_set_fd(session_, fd);
    if (server) ssl_.SSL_set_accept_state(session_);
    else ssl_.SSL_set_connect_state(session_);
    if (ssl_.SSL_do_handshake(session_) != 1) fail(ssl_.problem());
  }

  void send(const void* data, size_t size) {
    size_t n;
    for (auto* p = static_cast<const char*>(data); size; p += n, size -= n)
      if (ssl_.SSL_write_ex(session_, p, size, &n) != 1) fail(ssl_.problem());
  }
  // False at the end of the connection.
  bool receive(void* into, size_t size) {
    size_t n;
    for (auto* p = static_cast<char*>(into); size; p += n, size -= n)
      if (ssl_.SSL_read_ex(session_, p, size, &n) != 1) return false;
    return true;
  }

 private:
  const OpenSsl& ssl_;
  SSL* session_;
};

void move(Plain& plain, std::vector<char>& memory, bool sends) {
  for (size_t at = 0; at < memory.size(); at += kStep) {
    auto n = std::min(kStep, memory.size() - at);
    if (sends) plain.send(memory.data() + at, n);
    else if (!plain.receive(memory.data() + at, n)) fail("the other end is gone");
  }
}

void serve(Plain plain) {
  std::vector<char> memory;
  char ping[kPing];
  for (Request request; plain.receive(&request, sizeof request);) {
    if (request.wish == kPingPong) {
      for (uint64_t i = 0; i < request.amount; ++i) {
        if (!plain.receive(ping, sizeof ping)) return;
        plain.send(ping, sizeof ping);
      }
      continue;
    }
    if (memory.size() != request.amount) memory.assign(request.amount, 1);
    move(plain, memory, request.wish == kGive);
    if (request.wish == kTake) plain.send(ping, 1);
  }
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double processor_seconds() {
  rusage used;
  ::getrusage(RUSAGE_SELF, &used);
  auto of = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return of(used.ru_utime) + of(used.ru_stime);
}

double ping(Plain& plain, uint64_t rounds) {
  Request request{kPingPong, rounds};
  plain.send(&request, sizeof request);
  char bytes[kPing] = {};
  std::vector<double> taken;
  for (uint64_t i = 0; i < rounds; ++i) {
    auto began = seconds();
    plain.send(bytes, sizeof bytes);
    plain.receive(bytes, sizeof bytes);
    taken.push_back(seconds() - began);
  }
  std::nth_element(taken.begin(), taken.begin() + static_cast<long>(rounds / 2), taken.end());
  return taken[rounds / 2];
}

double carry(std::vector<Plain>& streams, std::vector<std::vector<char>>& memories, uint64_t bytes, bool sends) {
  auto share = bytes / streams.size();
  for (auto& memory : memories)
    if (memory.size() != share) memory.assign(share, 1);
  auto began = seconds();
  std::vector<std::thread> threads;
  for (size_t i = 0; i < streams.size(); ++i)
    threads.emplace_back([&, i] {
      Request request{sends ? kTake : kGive, share};
      streams[i].send(&request, sizeof request);
      move(streams[i], memories[i], sends);
      char done;
      if (sends && !streams[i].receive(&done, 1)) fail("the other end is gone");
    });
  for (auto& thread : threads) thread.join();
  return seconds() - began;
}

}  // namespace

int main(int count, char** words) {
  if (count < 6) fail("tls_floor serve|ask LIBRARY AUTHORITY CERTIFICATE KEY [PORT STREAMS]");
  bool server = !std::strcmp(words[1], "serve");
  OpenSsl ssl(words[2]);
  auto* context = context_of(ssl, words + 3, server);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (server) {
    int listening = ::socket(AF_INET, SOCK_STREAM, 0);
    socklen_t length = sizeof address;
    if (::bind(listening, reinterpret_cast<sockaddr*>(&address), length) || ::listen(listening, 64)) fail("no port");
    ::getsockname(listening, reinterpret_cast<sockaddr*>(&address), &length);
    std::printf("%d\n", ntohs(address.sin_port));
    std::fflush(stdout);
    std::thread([&] {
      for (;;) {
        int fd = ::accept(listening, nullptr, nullptr);
        std::thread([&, fd] { serve(Plain(ssl, context, fd, true)); }).detach();
      }
    }).detach();
    while (std::getchar() != EOF) continue;
    std::_Exit(0);
  }
  address.sin_port = htons(static_cast<uint16_t>(std::atoi(words[6])));
  std::vector<Plain> streams;
  for (int i = 0; i < std::atoi(words[7]); ++i) {
    int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address)) fail("nobody listens there");
    streams.emplace_back(ssl, context, fd, false);
  }
  std::vector<std::vector<char>> memories(streams.size());
  std::string wish;
  for (uint64_t amount; std::cin >> wish >> amount;) {
    auto used = processor_seconds();
    auto taken = wish == "ping" ? ping(streams[0], amount) : carry(streams, memories, amount, wish == "send");
    std::printf("%.9f %.6f\n", taken, processor_seconds() - used);
    std::fflush(stdout);
  }
}
