#include "connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace sky {
namespace {

#ifdef MSG_NOSIGNAL
constexpr int kNoSignal = MSG_NOSIGNAL;
#else
constexpr int kNoSignal = 0;
#endif

int milliseconds_left(std::chrono::steady_clock::time_point until) {
  auto left = until - std::chrono::steady_clock::now();
  return std::max(0, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()));
}

}  // namespace

TlsContext::TlsContext(std::shared_ptr<const OpenSsl> given, const std::string& authority,
                       const std::string& certificate, const std::string& key, bool server, bool kernel)
    : library(std::move(given)), is_server(server) {
  auto& ssl = *library;
  ssl.ERR_clear_error();
  std::unique_ptr<SSL_CTX, decltype(ssl.SSL_CTX_free)> made(
      ssl.SSL_CTX_new(server ? ssl.TLS_server_method() : ssl.TLS_client_method()), ssl.SSL_CTX_free);
  auto check = [&](bool good) {
    if (!good) throw std::runtime_error(ssl.problem());
  };
  check(made != nullptr);
  auto* context = made.get();
  auto read = [&](const std::string& text, auto* function, auto* free) {
    std::unique_ptr<BIO, decltype(ssl.BIO_free)> memory(ssl.BIO_new_mem_buf(text.data(), static_cast<int>(text.size())),
                                                        ssl.BIO_free);
    auto* found = memory ? function(memory.get(), nullptr, nullptr, nullptr) : nullptr;
    return std::unique_ptr<std::remove_pointer_t<decltype(found)>, decltype(free)>(found, free);
  };
  check(ssl.SSL_CTX_ctrl(context, kSetMinimum, kTls13, nullptr));
  ssl.SSL_CTX_ctrl(context, kSetMode, kPartialWrites | kMovingBuffers, nullptr);
  // One read of the socket for a record and its head. No more: OpenSSL moves all that it has read ahead at each record.
  ssl.SSL_CTX_ctrl(context, kSetReadAhead, 1, nullptr);
  ssl.SSL_CTX_set_verify(context, kVerifyPeer | kFailWithoutPeer, nullptr);
  // Nobody would read the tickets on a connection that the client only sends on.
  if (server) check(ssl.SSL_CTX_set_num_tickets(context, 0));
  if (kernel) ssl.SSL_CTX_set_options(context, kKernelTls);
  auto trusted = read(authority, ssl.PEM_read_bio_X509, ssl.X509_free);
  check(trusted && ssl.X509_STORE_add_cert(ssl.SSL_CTX_get_cert_store(context), trusted.get()));
  auto own = read(certificate, ssl.PEM_read_bio_X509, ssl.X509_free);
  check(own && ssl.SSL_CTX_use_certificate(context, own.get()));
  auto secret = read(key, ssl.PEM_read_bio_PrivateKey, ssl.EVP_PKEY_free);
  check(secret && ssl.SSL_CTX_use_PrivateKey(context, secret.get()));
  check(ssl.SSL_CTX_check_private_key(context));
  this->context = made.release();
}

TlsContext::~TlsContext() { library->SSL_CTX_free(context); }

Connection::Connection(int fd, std::shared_ptr<const TlsContext> context, const char* name)
    : fd_(fd), context_(std::move(context)) {
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
  if (!context_) return;
  ssl_ = library().SSL_new(context_->context);
  bool good = ssl_ && library().SSL_set_fd(ssl_, fd_) && (!name || library().SSL_set1_host(ssl_, name));
  if (!good) {
    auto why = library().problem();
    if (ssl_) library().SSL_free(ssl_);
    ::close(fd_);
    throw std::runtime_error(why);
  }
  if (context_->is_server) library().SSL_set_accept_state(ssl_);
  else library().SSL_set_connect_state(ssl_);
}

Connection::~Connection() {
  if (ssl_) library().SSL_free(ssl_);
  ::close(fd_);
}

int Connection::shake(int milliseconds) {
  auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  while (ssl_) {
    errno = 0;
    library().ERR_clear_error();
    int result = library().SSL_do_handshake(ssl_);
    if (result == 1) break;
    if (outcome(result, 0) == kOver) return kOver;
    if (!await(!wants_write_, milliseconds < 0 ? -1 : milliseconds_left(until))) return kNotNow;
  }
  return 1;
}

// What became of a call that has moved so many bytes.
ssize_t Connection::outcome(int result, size_t moved) {
  if (result > 0) return static_cast<ssize_t>(moved);
  int error = library().SSL_get_error(ssl_, result);
  wants_write_ = error == kWantWrite;
  if (error == kWantRead || error == kWantWrite) return kNotNow;
  why_ = error == kErrorSyscall && errno ? std::strerror(errno) : library().problem();
  return kOver;
}

ssize_t Connection::receive(void* into, size_t size) {
  if (ssl_) {
    size_t moved = 0;
    errno = 0;
    library().ERR_clear_error();
    // Two statements: a compiler may read `moved` before it calls.
    int result = library().SSL_read_ex(ssl_, into, size, &moved);
    return outcome(result, moved);
  }
  for (;;) {
    auto n = ::recv(fd_, into, size, 0);
    if (n > 0) return n;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return kNotNow;
    why_ = n ? std::strerror(errno) : "the other end closed the connection";
    return kOver;
  }
}

ssize_t Connection::read(void* into, size_t size) {
  if (early_at_ == early_end_) {
    if (size >= early_.size()) return receive(into, size);
    auto n = receive(early_.data(), early_.size());
    if (n <= 0) return n;
    early_at_ = 0;
    early_end_ = static_cast<size_t>(n);
  }
  auto n = std::min(size, early_end_ - early_at_);
  std::memcpy(into, early_.data() + early_at_, n);
  early_at_ += n;
  return static_cast<ssize_t>(n);
}

ssize_t Connection::write(const void* data, size_t size) {
  if (ssl_) {
    size_t moved = 0;
    errno = 0;
    library().ERR_clear_error();
    // Two statements: a compiler may read `moved` before it calls.
    int result = library().SSL_write_ex(ssl_, data, size, &moved);
    return outcome(result, moved);
  }
  for (;;) {
    auto n = ::send(fd_, data, size, kNoSignal);
    if (n > 0) return n;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return kNotNow;
    why_ = std::strerror(errno);
    return kOver;
  }
}

bool Connection::await(bool to_read, int milliseconds) const {
  pollfd watched{fd_, static_cast<short>(to_read ? POLLIN : POLLOUT), 0};
  int ready = ::poll(&watched, 1, milliseconds);
  return ready > 0 || (ready < 0 && errno == EINTR);
}

void Connection::acknowledge_less() const noexcept {
#ifdef TCP_QUICKACK
  int off = 0;
  ::setsockopt(fd_, IPPROTO_TCP, TCP_QUICKACK, &off, sizeof off);
#endif
}

std::string Connection::peer() const {
  auto* certificate = ssl_ ? library().SSL_get1_peer_certificate(ssl_) : nullptr;
  if (!certificate) return "";
  char name[256] = "";
  library().X509_NAME_get_text_by_NID(library().X509_get_subject_name(certificate), kCommonName, name, sizeof name);
  library().X509_free(certificate);
  return name;
}

void Connection::shut() noexcept { ::shutdown(fd_, SHUT_RDWR); }

}  // namespace sky
