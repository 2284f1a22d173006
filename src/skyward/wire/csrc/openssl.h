// The functions of OpenSSL 3 that a link uses, found at run time in a library that the process has or the system has.
// No header of OpenSSL is needed to compile this. Others in the process may use another copy: each object has the
// functions of one library alone.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace sky {

struct SSL;
struct SSL_CTX;
struct SSL_METHOD;
struct BIO;
struct X509;
struct X509_STORE;
struct X509_NAME;
struct EVP_PKEY;

// Numbers of OpenSSL's stable interface.
constexpr int kTls13 = 0x0304, kSetMode = 33, kSetReadAhead = 41, kSetMinimum = 123;
constexpr long kPartialWrites = 1, kMovingBuffers = 2, kReleaseBuffers = 16;
constexpr int kVerifyPeer = 1, kFailWithoutPeer = 2;
constexpr int kErrorSsl = 1, kWantRead = 2, kWantWrite = 3, kErrorSyscall = 5, kZeroReturn = 6;
constexpr int kCommonName = 13;
constexpr uint64_t kKernelTls = 1 << 3;
constexpr int kVersionText = 0;

class OpenSsl {
 public:
  // Throws, with the reason, if the library has not all of these. Without a path, the program's own: it may have been
  // linked with OpenSSL.
  explicit OpenSsl(const char* path) : handle_(open(path)) {
    if (!handle_) throw std::runtime_error(::dlerror());
#define SKY_FIND(name) find(name, #name)
    SKY_FIND(OpenSSL_version_num), SKY_FIND(OpenSSL_version);
    if (OpenSSL_version_num() < 0x30000000UL) throw std::runtime_error("it is older than OpenSSL 3");
    SKY_FIND(TLS_client_method), SKY_FIND(TLS_server_method), SKY_FIND(SSL_CTX_new), SKY_FIND(SSL_CTX_free);
    SKY_FIND(SSL_CTX_ctrl), SKY_FIND(SSL_CTX_set_verify), SKY_FIND(SSL_CTX_set_num_tickets);
    SKY_FIND(SSL_CTX_get_cert_store), SKY_FIND(SSL_CTX_use_certificate), SKY_FIND(SSL_CTX_use_PrivateKey);
    SKY_FIND(SSL_CTX_check_private_key), SKY_FIND(SSL_CTX_set_options);
    SKY_FIND(SSL_new), SKY_FIND(SSL_free), SKY_FIND(SSL_set_fd), SKY_FIND(SSL_set1_host);
    SKY_FIND(SSL_set_connect_state), SKY_FIND(SSL_set_accept_state), SKY_FIND(SSL_do_handshake);
    SKY_FIND(SSL_read_ex), SKY_FIND(SSL_write_ex), SKY_FIND(SSL_get_error), SKY_FIND(SSL_has_pending);
    SKY_FIND(SSL_get1_peer_certificate), SKY_FIND(BIO_new_mem_buf), SKY_FIND(BIO_free), SKY_FIND(PEM_read_bio_X509);
    SKY_FIND(PEM_read_bio_PrivateKey), SKY_FIND(X509_STORE_add_cert), SKY_FIND(X509_free), SKY_FIND(EVP_PKEY_free);
    SKY_FIND(X509_get_subject_name), SKY_FIND(X509_NAME_get_text_by_NID), SKY_FIND(ERR_get_error);
    SKY_FIND(ERR_clear_error), SKY_FIND(ERR_reason_error_string);
#undef SKY_FIND
  }
  OpenSsl(const OpenSsl&) = delete;

  unsigned long (*OpenSSL_version_num)();
  const char* (*OpenSSL_version)(int);
  const SSL_METHOD* (*TLS_client_method)();
  const SSL_METHOD* (*TLS_server_method)();
  SSL_CTX* (*SSL_CTX_new)(const SSL_METHOD*);
  void (*SSL_CTX_free)(SSL_CTX*);
  long (*SSL_CTX_ctrl)(SSL_CTX*, int, long, void*);
  void (*SSL_CTX_set_verify)(SSL_CTX*, int, void*);
  int (*SSL_CTX_set_num_tickets)(SSL_CTX*, size_t);
  X509_STORE* (*SSL_CTX_get_cert_store)(const SSL_CTX*);
  int (*SSL_CTX_use_certificate)(SSL_CTX*, X509*);
  int (*SSL_CTX_use_PrivateKey)(SSL_CTX*, EVP_PKEY*);
  int (*SSL_CTX_check_private_key)(const SSL_CTX*);
  uint64_t (*SSL_CTX_set_options)(SSL_CTX*, uint64_t);
  SSL* (*SSL_new)(SSL_CTX*);
  void (*SSL_free)(SSL*);
  int (*SSL_set_fd)(SSL*, int);
  int (*SSL_set1_host)(SSL*, const char*);
  void (*SSL_set_connect_state)(SSL*);
  void (*SSL_set_accept_state)(SSL*);
  int (*SSL_do_handshake)(SSL*);
  int (*SSL_read_ex)(SSL*, void*, size_t, size_t*);
  int (*SSL_write_ex)(SSL*, const void*, size_t, size_t*);
  int (*SSL_get_error)(const SSL*, int);
  int (*SSL_has_pending)(const SSL*);
  X509* (*SSL_get1_peer_certificate)(const SSL*);
  BIO* (*BIO_new_mem_buf)(const void*, int);
  int (*BIO_free)(BIO*);
  X509* (*PEM_read_bio_X509)(BIO*, X509**, void*, void*);
  EVP_PKEY* (*PEM_read_bio_PrivateKey)(BIO*, EVP_PKEY**, void*, void*);
  int (*X509_STORE_add_cert)(X509_STORE*, X509*);
  void (*X509_free)(X509*);
  void (*EVP_PKEY_free)(EVP_PKEY*);
  X509_NAME* (*X509_get_subject_name)(const X509*);
  int (*X509_NAME_get_text_by_NID)(X509_NAME*, int, char*, int);
  unsigned long (*ERR_get_error)();
  void (*ERR_clear_error)();
  const char* (*ERR_reason_error_string)(unsigned long);

  // Such as "OpenSSL 3.0.13 30 Jan 2024 from /usr/lib/libssl.so.3".
  std::string name() const {
    Dl_info found;
    bool is_known = ::dladdr(reinterpret_cast<void*>(SSL_new), &found) && found.dli_fname;
    return std::string(OpenSSL_version(kVersionText)) + (is_known ? std::string(" from ") + found.dli_fname : "");
  }

  // What the last call of this thread says went wrong.
  std::string problem() const {
    auto* reason = ERR_reason_error_string(ERR_get_error());
    ERR_clear_error();
    return reason ? reason : "the other end closed the connection";
  }

 private:
  static void* open(const char* path) {
    constexpr int kFlags = RTLD_NOW | RTLD_LOCAL;
// The runtimes of sanitizers refuse it.
#if defined(RTLD_DEEPBIND) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    // One that is loaded stays as it is. Another one must call its own libcrypto, although a program that exports its
    // OpenSSL, or a library that was loaded for all, has functions of the same names.
    if (path)
      if (auto* loaded = ::dlopen(path, kFlags | RTLD_NOLOAD)) return loaded;
    return ::dlopen(path, path ? kFlags | RTLD_DEEPBIND : kFlags);
#else
    return ::dlopen(path, kFlags);
#endif
  }

  // All come from libssl and its libcrypto, or from one library that has both: a program may have several.
  template <typename F>
  void find(F& function, const char* name) {
    auto* found = ::dlsym(handle_, name);
    if (!found) throw std::runtime_error(std::string("it has no ") + name);
    Dl_info home{};
    ::dladdr(found, &home);
    auto& known = std::string(name).starts_with("SSL_") || std::string(name).starts_with("TLS_") ? ssl_ : crypto_;
    if (!known) known = home.dli_fbase;
    if (known != home.dli_fbase) throw std::runtime_error(std::string("another library has its ") + name);
    function = reinterpret_cast<F>(found);
  }

  void* const handle_;
  void *ssl_ = nullptr, *crypto_ = nullptr;
};

}  // namespace sky
