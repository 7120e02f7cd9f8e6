// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace breccia {

/// The one exception type of the library. `kind` tells the two classes of mistake apart, as Python does:
/// a wrong kind of thing (TypeError) or a thing of the right kind with a wrong value (ValueError).
class Error : public std::runtime_error {
public:
    enum class Kind { value, type };

    Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
    [[nodiscard]] Kind kind() const noexcept { return kind_; }

private:
    Kind kind_;
};

[[noreturn]] inline void throw_value(const std::string& message) { throw Error(Error::Kind::value, message); }
[[noreturn]] inline void throw_type(const std::string& message) { throw Error(Error::Kind::type, message); }

}  // namespace breccia
