// SPDX-License-Identifier: Apache-2.0
//
// The exception that every function of the library may throw.
#pragma once

#include <stdexcept>
#include <string>

#include "breccia/version.hpp"

namespace breccia::inline v0_4 {

/// The one exception type of the library. `kind` tells the two classes of mistake apart, as Python does:
/// a wrong kind of thing (TypeError) or a thing of the right kind with a wrong value (ValueError).
class BRECCIA_API Error : public std::runtime_error {
public:
    /// A wrong value, or a wrong type of thing.
    enum class Kind { value, type };

    /// `message`: a sentence that names the argument, what it was and what it must be.
    Error(Kind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
    /// Which of the two mistakes it is.
    [[nodiscard]] Kind kind() const noexcept { return kind_; }
    /// The message. Not inline: the class's type information stands beside it, once for all libraries of a program,
    /// which some C++ runtimes (libc++) need to catch an Error of another library.
    [[nodiscard]] const char* what() const noexcept override;

private:
    Kind kind_;
};

/// Throw an Error of that kind.
/// @{
[[noreturn]] inline void throw_value(const std::string& message) { throw Error(Error::Kind::value, message); }
[[noreturn]] inline void throw_type(const std::string& message) { throw Error(Error::Kind::type, message); }
/// @}

}  // namespace breccia::inline v0_4
