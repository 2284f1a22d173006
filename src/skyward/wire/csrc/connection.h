// A connection: a socket that does not wait, with TLS or plain, used in one direction by one thread at a time.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "openssl.h"

namespace sky {

// What both ends of a pool's connections prove: certificates of the pool's own authority.
class TlsContext {
 public:
  // With `kernel`, the kernel encrypts and decrypts if it can.
  TlsContext(std::shared_ptr<const OpenSsl> library, const std::string& authority, const std::string& certificate,
             const std::string& key, bool server, bool kernel);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;

  const std::shared_ptr<const OpenSsl> library;
  const bool is_server;
  SSL_CTX* context = nullptr;
};

class Connection {
 public:
  // Takes the socket over. With a context it is encrypted once `shake` has returned; `name` is whom a client expects.
  Connection(int fd, std::shared_ptr<const TlsContext> context, const char* name);
  ~Connection();
  Connection(const Connection&) = delete;

  static constexpr ssize_t kNotNow = 0, kOver = -1;
  // 1 when it is done, `kNotNow` if the time has passed, `kOver` with a reason.
  int shake(int milliseconds);
  // How many bytes, at least one; or `kNotNow`, or `kOver`.
  ssize_t read(void* into, size_t size);
  ssize_t write(const void* data, size_t size);
  // Whether `read` may have bytes although the socket has none.
  bool has_pending() const { return early_at_ < early_end_ || (ssl_ && library().SSL_has_pending(ssl_)); }
  // Waits for the socket; false if the time has passed. A negative time means for ever.
  bool await(bool to_read, int milliseconds) const;

  // Until it has been silent for 40 ms, the kernel acknowledges every other small message, not each: on a connection of
  // one direction, that takes as long as to send one.
  void acknowledge_less() const noexcept;

  std::string peer() const;  // the name in the other end's certificate
  // Reads and writes of any thread end at once; what has arrived can still be read.
  void shut() noexcept;
  int fd() const { return fd_; }
  bool is_encrypted() const { return ssl_ != nullptr; }
  const std::string& why() const { return why_; }

 private:
  const OpenSsl& library() const { return *context_->library; }
  ssize_t outcome(int result, size_t moved);
  ssize_t receive(void* into, size_t size);

  const int fd_;
  const std::shared_ptr<const TlsContext> context_;
  SSL* ssl_ = nullptr;
  bool wants_write_ = false;
  std::string why_;
  // What has come and nobody has read: a small message is a few short reads, each of which would be a call of the
  // kernel, or cost OpenSSL 2 us.
  std::array<char, 4096> early_;
  size_t early_at_ = 0, early_end_ = 0;
};

}  // namespace sky
